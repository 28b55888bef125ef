"""Whole sessions on a CUDA device that computes nothing: files of tests, in a process of their own.

They are each ``case_*.py`` here, and in every room each ``test_*_on_gpu.py``, whose tests run on a real GPU as well.

torch can be told of such a device only while a process begins (:mod:`.machine`). To run one file or one case by hand:

    pytest tests/fake_cuda                          # as the suite does, its output on failure
    MEZZO_FAKE_CUDA=<library> pytest -o python_files='case_*.py' tests/fake_cuda/case_sessions.py -k "O2 and split"

``<library>`` is what :func:`library` has compiled, ``$XDG_CACHE_HOME/mezzo/fake_cuda-*.so``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import building

HERE = Path(__file__).parent
#: They run together: torch is imported, the device set up, and each kernel written, once for all.
CASES = [*sorted(HERE.glob("case_*.py")), *sorted(HERE.parent.glob("**/test_*_on_gpu.py"))]


def library() -> Path:
    """Compile ``device.cpp``, or skip."""
    if (reason := building.obstacle()) is not None:
        pytest.skip(reason)
    return building.library(Path(os.environ["XDG_CACHE_HOME"], "mezzo"), "device.cpp")


def test_on_a_device_that_computes_nothing(request):
    asked = request.config.getoption("markexpr")
    slow = asked if asked in ("", "slow") else "not slow"
    command = [
        sys.executable, "-m", "pytest", "-q", "-n0", "-o", "python_files=case_*.py test_*.py", "-m", slow,
        "-p", "no:cacheprovider", "--no-header", "--tb=short", "--show-capture=no", "-rN", *map(str, CASES),
    ]  # fmt: skip
    kernels = Path(os.environ["XDG_CACHE_HOME"], "mezzo", "triton")
    surroundings = {**os.environ, "MEZZO_FAKE_CUDA": str(library()), "TRITON_CACHE_DIR": str(kernels)}
    surroundings.pop("TRITON_INTERPRET", None)
    surroundings.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, cwd=HERE.parents[1], check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
