"""Measure what only a GPU can tell, part by part, and write one page of verdicts.

Run with ``make gpu``. Each part runs in a process of its own, since an illegal address ends all of CUDA in one, and
writes ``gpu-PART-DEVICE-DATE.json``. A part whose file of today is there is not measured again, so that the run can be
ended and taken up at any time; the page is written after each part.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
#: Without them nothing can be measured.
NEEDED = ("torch", "triton", "numpy", "rich", "typer", "pytest")
LACKING = 3


def lacking() -> str:
    """Return what this machine lacks, or nothing."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return f"the Python packages {', '.join(missing)} ({sys.executable})"
    import torch

    if not torch.cuda.is_available():
        return f"a CUDA device (torch {torch.__version__} sees none)"
    return ""


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--parts", nargs="+", help="these alone")
    parser.add_argument("--again", action="store_true", help="measure parts of today again")
    parser.add_argument("--minutes", type=float, default=30, help="no part begins that might end later")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, as small as can be; figures mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # one part, in this process
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    given = options().parse_args(arguments)
    if not given.dry_run and (lack := lacking()):
        print(f"make gpu: lacks {lack}", file=sys.stderr)
        return LACKING
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    from .parts import PARTS

    if unknown := {*(given.parts or ()), *([given.alone] if given.alone else ())} - {*PARTS}:
        print(f"make gpu: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if given.alone:
        alone(given.alone, dry=given.dry_run, out=given.out)
        return 0
    start = here if given.dry_run else apart
    run = Run(dry=given.dry_run, out=given.out, again=given.again, minutes=given.minutes, start=start)
    for name in given.parts or PARTS:
        run.take(name)
    print(f"verdicts in {run.page()}")
    return 1 if run.failures else 0


def alone(name: str, *, dry: bool, out: Path) -> Path:
    """Measure one part in this process, and write its file."""
    import torch

    import mezzo
    from harness import write_dated
    from stepping.facts import facts

    from .parts import PARTS
    from .plan import Plan

    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"
    start = time.perf_counter()
    found = PARTS[name].measure(Plan(device=device, dry=dry))
    about = {**facts(device), "mezzo": mezzo.__version__, "cuda": torch.version.cuda, "dry": dry}
    result = {**about, "part": name, "seconds": time.perf_counter() - start, "found": found}
    return write_dated(out, f"gpu-{name}", result)


def apart(name: str, limit: int, out: Path) -> str:
    """Measure one part in a process of its own; return why that failed, or nothing."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gpu", "--alone", name, "--out", str(out)], timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return f"ended after {limit} s"
    return f"exited with {done.returncode}" if done.returncode else ""


def here(name: str, limit: int, out: Path) -> str:
    """Measure one part of a dry run, which has no CUDA to lose and no time to waste."""
    alone(name, dry=True, out=out)
    return ""


class Run:
    """Parts one after another, those that are there from earlier today included.

    Args:
        dry: On the CPU.
        out: Where results are.
        again: Measure what is there as well.
        minutes: For all of them.
        start: What measures a part: as :func:`apart` does.
    """

    def __init__(
        self, *, dry: bool, out: Path, again: bool, minutes: float, start: Callable[[str, int, Path], str]
    ) -> None:
        self.dry, self.out, self.again, self.start = dry, out, again, start
        self.until = time.monotonic() + 60 * minutes
        self.failures: dict[str, str] = {}

    def file(self, name: str) -> Path:
        """Where the result of a part of today is, or will be."""
        device = "cpu" if self.dry else "cuda"
        return self.out / f"gpu-{name}-{device}-{datetime.date.today().isoformat()}.json"

    def take(self, name: str) -> None:
        """Measure a part unless it is there, and write the page anew."""
        from .parts import PARTS

        if self.file(name).exists() and not self.again:
            print(f"{name}: there from earlier today ({self.file(name)})", flush=True)
            return
        limit = PARTS[name].limit_s
        if time.monotonic() + limit > self.until:
            self.failures[name] = f"no time left for its {limit} s"
        else:
            print(f"{name}: at most {limit} s", flush=True)
            self.file(name).unlink(missing_ok=True)
            if why := self.start(name, limit, self.out) or ("" if self.file(name).exists() else "wrote no result"):
                self.failures[name] = why
        if name in self.failures:
            print(f"{name}: {self.failures[name]}", flush=True)
        self.page()

    def page(self) -> Path:
        """Write the page of verdicts from all results of today."""
        from .parts import PARTS
        from .verdicts import page

        files = {name: json.loads(self.file(name).read_text()) for name in PARTS if self.file(name).exists()}
        about = next(iter(files.values()), None)
        title = f"{about['machine']}, torch {about['torch']}, {about['date']}" if about else "nothing measured"
        if self.dry:
            title = f"Dry run, whose figures mean nothing: {title}"
        target = self.out / self.file("verdicts").with_suffix(".md").name
        target.parent.mkdir(parents=True, exist_ok=True)
        results = {name: each["found"] for name, each in files.items()}
        target.write_text(page(title, results, self.failures))
        return target


if __name__ == "__main__":
    sys.exit(main())
