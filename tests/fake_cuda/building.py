"""Compiling the device that computes nothing, against the installed torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def obstacle() -> str | None:
    """What the device lacks here, in words."""
    import torch

    if sys.platform != "linux" or shutil.which("g++") is None:
        return "needs g++ on Linux, to compile a CUDA device that computes nothing"
    if torch.backends.cuda.is_built():
        return "needs torch's CPU build, which has no CUDA device of its own"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton"
    return None


def library(folder: Path, *sources: str) -> Path:
    """Compile sources of this folder into one library, once for each version of them and of torch.

    Args:
        folder: Where it is kept.
        sources: The files' names.
    """
    import torch

    files = [HERE / name for name in sources]
    contents = b"".join(file.read_bytes() for file in files) + f"{torch.__version__} {torch.__file__}".encode()
    made = folder / f"fake_cuda-{hashlib.sha256(contents).hexdigest()[:16]}.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    include, lib = root / "include", root / "lib"
    with tempfile.TemporaryDirectory(dir=folder) as there:
        fresh = Path(there, "made.so")
        command = [
            "g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
            *map(str, files), "-o", str(fresh), f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        os.replace(fresh, made)
    return made
