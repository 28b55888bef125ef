"""Every program of ``benchmarks/`` runs once, as small as it can be: none rots between two measurements."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
#: What fills the pages, and measures nothing: ``tests/test_docs.py`` holds its text against them.
FILLS_PAGES = "pages.py"
#: By program: the words behind it, with which it takes seconds; what compiles takes most of a minute, once.
#: ``{runs}`` is a folder for what it keeps.
SMALLEST = {
    "allow_list.py": "--tokens 8 --repetitions 1",
    "below_sixteen.py": "--seeds 1 --only --script-steps 1 --runs {runs}",
    "distributed.py": "--size least --repetitions 1",
    "engine.py": "--layers 2 --repetitions 1",
    "formats.py": "--elements 4096 --repetitions 1",
    "gpu": "--dry-run",
    "heal.py": "--seeds 1 --script-steps 1",
    "host.py": "--tensors 2 4 --rounds 1",
    "memory.py": "--size least",
    "moments.py": "--steps 2 --stride 600 --seeds 1 --script-steps 2",
    "plan.py": "--models 'conv–log chain' --repetitions 1",
    "recorder.py": "--repetitions 1 --steps 2",
    "rollout.py": "--seeds 1 --steps 2 --pairs 2",
    "scaler.py": "--repetitions 1",
    "session.py": "--repetitions 1",
    "small.py": "--repetitions 1",
    "step.py": "--shapes 200-tiny --repetitions 1",
    "suite": "--dry-run --only digits_cnn --runs {runs}",
    "train.py": "--size least --repetitions 1",
}
#: What starts a program, where that is not Python alone.
STARTED = {"distributed.py": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]}


def programs():
    """What can be started: a file by its name, a package by its folder's."""
    files = {file.name for file in FOLDER.glob("*.py") if '__name__ == "__main__"' in file.read_text()}
    return sorted((files | {file.parent.name for file in FOLDER.glob("*/__main__.py")}) - {FILLS_PAGES})


def test_every_program_has_a_smallest_size():
    assert programs() == sorted(SMALLEST)


def results():
    return {file: file.stat().st_mtime_ns for file in (FOLDER / "results").rglob("*")}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: sizes are those of two cores")
@pytest.mark.parametrize("name", programs())
def test_a_benchmark_runs_and_writes_what_it_measured(name, tmp_path):
    if name in ("gpu", "host.py"):
        pytest.importorskip("triton", reason="needs Triton")
    before, out = results(), tmp_path / "out"
    program = [*STARTED.get(name, []), str(FOLDER / name)] if name.endswith(".py") else ["-m", name]
    words = [*shlex.split(SMALLEST[name].format(runs=tmp_path / "runs")), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", FOLDER)))}
    ran = subprocess.run(
        [sys.executable, *program, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout, name
    written = [json.loads(file.read_text()) for file in out.rglob("*.json")]
    assert written, f"{name} wrote no result; it said: {ran.stdout}"
    assert all(len(record) > 0 for record in written)
    assert results() == before
