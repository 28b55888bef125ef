"""C++ to a function: compiled for this processor once, kept on disk, loaded."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from mezzo.cache import folder
from mezzo.errors import UnsupportedError

__all__ = ["built"]

#: IEEE arithmetic, operation by operation, as torch's own kernels: no contraction, integers wrap. What is left out is
#: setting errno and traps, which nobody reads, and which vector instructions do not have.
_FLAGS: Final = (
    "-O3 -march=native -std=c++17 -fopenmp -fwrapv -ffp-contract=off -fno-math-errno -fno-trapping-math -shared -fPIC"
).split()
#: Compilers prefer half the width of a vector register for fear of lower clocks, which stores of 512 bits outweigh.
_X86: Final = ("-mprefer-vector-width=512",)
_COMPILERS: Final = ("g++", "clang++", "c++")


@cache
def built(source: str) -> Callable[..., None]:
    """Compile ``extern "C" void kernel(…)`` and return it; tensors go as their addresses, numbers as int64.

    Args:
        source: A whole program text, without headers of torch's.

    Raises:
        UnsupportedError: There is no compiler, or it fails.

    **Cost**: 0.2 s, or a millisecond where it lies on disk. The lock of the interpreter is released while it runs.
    """
    command = _command()
    name = hashlib.sha256("\0".join([source, _resolved(command)]).encode()).hexdigest()[:32]
    try:
        home = folder() / "kernels"
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except (OSError, RuntimeError):
        home = _process_folder()
    path = home / f"{name}.so"
    found = _loaded(path) if path.exists() else None
    if found is None:  # or damaged
        _compile(command, source, path)
        found = _loaded(path)
    if found is None:
        raise UnsupportedError(
            "a compiled optimizer kernel cannot be loaded",
            where=str(path),
            why="its folder is mounted without leave to run programs, perhaps",
            write="XDG_CACHE_HOME=a folder from which programs may run",
        )
    return found


def _loaded(path: Path) -> Callable[..., None] | None:
    try:
        function: Any = ctypes.CDLL(str(path)).kernel
    except (OSError, AttributeError):
        return None
    function.restype = None

    def kernel(*arguments: Any) -> None:
        function(*[ctypes.c_int64(each if isinstance(each, int) else each.data_ptr()) for each in arguments])

    return kernel


@cache
def _process_folder() -> Path:
    """Make a folder that goes when this process does."""
    path = tempfile.mkdtemp(prefix="mezzo-kernels-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def _command() -> list[str]:
    own = shlex.split(os.environ.get("CXX", ""))
    found = own or [next((path for name in _COMPILERS if (path := shutil.which(name))), "")]
    if sys.platform != "linux" or not shutil.which(found[0]):
        raise UnsupportedError(
            "no C++ compiler for optimizer kernels",
            where=f"CXX={shlex.join(own)}" if own else f"{sys.platform}, {', '.join(_COMPILERS)}",
            write="apt install g++ (or another C++ compiler, and CXX=its path), on Linux",
        )
    machine = os.uname().machine
    return [*found, *_FLAGS, *(_X86 if machine in ("x86_64", "AMD64") else ())]


@cache
def _asked(command: tuple[str, ...]) -> str:
    """Return the compiler's version and what ``native`` means here, as it says itself."""
    asked = subprocess.run([*command, "-###", "-x", "c++", "-E", "-"], capture_output=True, text=True, check=False)
    return asked.stderr


def _resolved(command: list[str]) -> str:
    return shlex.join(command) + _asked(tuple(command))


def _compile(command: list[str], source: str, path: Path) -> None:
    """Compile beside, then rename: no process ever loads half a file."""
    beside = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.partial")
    try:
        done = subprocess.run(
            [*command, "-x", "c++", "-", "-o", str(beside)], input=source, capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise UnsupportedError(
                "an optimizer kernel does not compile",
                where=shlex.join(command),
                why=lines[0] if lines else f"exit status {done.returncode}",
                write="CXX=the path of another C++ compiler with OpenMP, such as g++",
            )
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
