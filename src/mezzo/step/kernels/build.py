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
    home = _own_folder()
    path = (home or _process_folder()) / f"{name}.so"
    found = _loaded(path) if path.exists() else None
    if found is None:  # or damaged
        if home is not None and not os.access(home, os.W_OK):
            path = _process_folder() / path.name
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


def _own_folder() -> Path | None:
    """Return the folder where kernels are kept, or None: what others may write to is nothing to load programs from."""
    try:
        home = folder() / "kernels"
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = home.stat()
    except (OSError, RuntimeError):
        return None
    return home if facts.st_uid == os.getuid() and not facts.st_mode & 0o022 else None


def _process_folder() -> Path:
    return _made_for(os.getpid())  # not its parent's, which may end first


@cache
def _made_for(process: int) -> Path:
    """Make a folder that goes when a process does."""
    try:
        path = tempfile.mkdtemp(prefix="mezzo-kernels-")
    except OSError as error:
        raise UnsupportedError(
            "optimizer kernels have nowhere to be",
            why=str(error),
            write="XDG_CACHE_HOME=, or TMPDIR=, a folder that can be written to",
        ) from error
    atexit.register(_remove, Path(path), process)
    return Path(path)


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


def _command() -> list[str]:
    setting = os.environ.get("CXX", "")
    try:
        own = shlex.split(setting)
    except ValueError as error:
        raise UnsupportedError(
            "CXX is no command", where=f"CXX={setting}", why=str(error), write="CXX=the path of a C++ compiler"
        ) from error
    found = own or [next((path for name in _COMPILERS if (path := shutil.which(name))), "")]
    if sys.platform != "linux" or not shutil.which(found[0]):
        raise UnsupportedError(
            "no C++ compiler for optimizer kernels",
            where=f"CXX={shlex.join(own)}" if own else f"{sys.platform}, {', '.join(_COMPILERS)}",
            write="apt install g++ (or another C++ compiler, and CXX=its path), on Linux",
        )
    return [*found, *_FLAGS, *(_X86 if os.uname().machine == "x86_64" else ())]


@cache
def _asked(command: tuple[str, ...]) -> str:
    """Return the compiler's version and what ``native`` means here, as it says itself."""
    asked = _run([*command, "-###", "-x", "c++", "-E", "-"])
    if asked.returncode or not asked.stderr:  # then what it runs on stands for what it makes of that
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return asked.stderr


def _resolved(command: list[str]) -> str:
    return shlex.join(command) + _asked(tuple(command))


def _run(command: list[str], source: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnsupportedError(
            "the C++ compiler does not run",
            where=shlex.join(command[:1]),
            why=str(error),
            write="CXX=the path of a C++ compiler, such as g++",
        ) from error


def _compile(command: list[str], source: str, path: Path) -> None:
    """Compile beside, then rename: no process ever loads half a file."""
    beside = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.partial")
    try:
        done = _run([*command, "-x", "c++", "-", "-o", str(beside)], source)
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
