"""Plant each fault of the table in a copy of the source, and see that the tests named for it catch it.

``make faults``, or ``make faults FAULTS="scale/ halves:"`` for those of such files, or with such names. The checkout itself is never
written to. First the named tests run on the copy as it is: a test that fails there catches nothing. Torch is imported
once: each run is a fork of this process, which imports mezzo from its copy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch  # noqa: F401 - before the forks, since it takes seconds

from .fault import Fault
from .table import FAULTS

ROOT = Path(__file__).parents[2]
#: What pytest returns: all passed, some failed.
PASSED, FAILED = 0, 1
#: What none of it returns.
UNKNOWN = 99
#: After which a run counts as one that hangs.
SECONDS = 600


class Run:
    """Tests of the checkout on a copy of the source, in a process of their own, with a fault or without."""

    def __init__(self, source: Path, tests: Sequence[str], fault: Fault | None) -> None:
        self.source, self.fault, self.begun = source, fault, time.monotonic()
        self.printed = source.parent / "printed"
        self.before = "" if fault is None else (source / "mezzo" / fault.file).read_text()
        if fault is not None:
            if (count := self.before.count(fault.text)) != 1:
                raise SystemExit(f"{fault.name}: its text occurs {count} times in {fault.file}")
            self.write(self.before.replace(fault.text, fault.planted))
        options = ["-q", "--tb=no", "-m", "not slow", "-p", "no:cacheprovider", *(["-x"] if fault else [])]
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=_test, args=(source, self.printed, [*options, *tests]))
        self.process.start()

    def write(self, text: str) -> None:
        """Write the fault's file. What was compiled of a file is told from the new one by its second and size alone."""
        assert self.fault is not None
        file = self.source / "mezzo" / self.fault.file
        file.write_text(text)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def end(self) -> tuple[int | None, str]:
        """Put the source back; return what pytest did, and what it printed."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        if self.fault is not None:
            self.write(self.before)
        return self.process.exitcode, self.printed.read_text(errors="replace")


def _test(source: Path, printed: Path, arguments: list[str]) -> None:
    """Run pytest, in the child."""
    code = UNKNOWN
    try:
        with printed.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ |= {"PYTHONPATH": str(source), "MEZZO_PLANTED": "1"}
        sys.path.insert(0, str(source))
        os.chdir(ROOT)
        code = pytest.main(arguments)
        import mezzo

        if source not in Path(mezzo.__file__).parents:
            print(f"mezzo was imported from {mezzo.__file__}")
            code = UNKNOWN
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def runs(copies: Iterable[Path], what: Iterable[tuple[Sequence[str], Fault | None]]) -> Iterator[Run]:
    """Run one after another on each copy of the source; yield those that are over, before they are ended."""
    free, waiting, active = list(copies), list(what)[::-1], list[Run]()
    while waiting or active:
        while free and waiting:
            active.append(Run(free.pop(), *waiting.pop()))
        wait([run.process.sentinel for run in active], timeout=10)
        for run in list(active):
            if not run.process.is_alive() or time.monotonic() - run.begun > SECONDS:
                active.remove(run)
                yield run
                free.append(run.source)


def verdict(code: int | None, printed: str) -> tuple[bool, str]:
    """Say whether a fault was caught, and by which test, or what happened instead."""
    if code == FAILED:
        failure = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
        return True, failure[1] if failure else ""
    words = "all tests pass" if code == PASSED else f"no test judged it ({code}): {' '.join(printed.split())[-300:]}"
    return False, words


def main() -> int:
    """Plant the faults, and tell what was not caught again at the end."""
    parser = argparse.ArgumentParser(description="Plant faults in a copy of the source; tests are to catch them.")
    parser.add_argument(
        "names", nargs="*", help="which faults: part of a name, or of the file's path; all when omitted"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trust", action="store_true", help="do not run the tests on the source as it is")
    options = parser.parse_args()
    faults = [
        fault for fault in FAULTS if not options.names or any(n in fault.name or n in fault.file for n in options.names)
    ]
    lost, start = list[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mezzo-faults-") as folder:
        copies = [Path(folder) / str(number) / "src" for number in range(options.jobs)]
        for copy in copies:
            shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        tests = sorted({test for fault in faults for test in fault.tests})
        parts = (
            [] if options.trust else [(part, None) for n in range(options.jobs) if (part := tests[n :: options.jobs])]
        )
        for run in runs(copies, parts):
            code, printed = run.end()
            if code != PASSED:
                failed = re.findall(r"^(?:FAILED|ERROR) .*", printed, re.MULTILINE) or [printed[-2000:]]
                lost += ["tests that fail on the source as it is would catch nothing", *failed]
        for run in runs(copies, [] if lost else [(fault.tests, fault) for fault in faults]):
            caught, words = verdict(*run.end())
            assert run.fault is not None
            print(f"{'caught' if caught else 'LOST':7} {run.fault.name:42} {words}", flush=True)
            if not caught:
                lost.append(f"not caught: {run.fault.name} ({run.fault.file}): {run.fault.reason}")
    print(f"{len(faults)} faults, in {time.monotonic() - start:.0f} s", *lost, sep="\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
