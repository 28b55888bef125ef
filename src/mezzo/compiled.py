"""C++ to a function: compiled for this processor once, kept on disk, loaded."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from mezzo import files
from mezzo.errors import UnsupportedError

logger = logging.getLogger(__name__)

#: IEEE arithmetic, operation by operation, as torch's own kernels: no contraction, integers wrap. What is left out is
#: setting errno and traps, which nobody reads, and which vector instructions do not have.
_FLAGS: Final = (
    "-O3 -march=native -std=c++17 -fopenmp -fwrapv -ffp-contract=off -fno-math-errno -fno-trapping-math -shared -fPIC"
).split()
#: Compilers prefer half the width of a vector register for fear of lower clocks, which stores of 512 bits outweigh.
_X86: Final = ("-mprefer-vector-width=512",)
_COMPILERS: Final = ("g++", "clang++", "c++")


class CppKernel:
    """A compiled function; tensors go as their addresses, numbers as int64."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        """Run it. The lock of the interpreter is released meanwhile."""
        values = []
        for argument in arguments:
            values.append(ctypes.c_int64(argument if type(argument) is int else argument.data_ptr()))
        self._function(*values)


@cache
def built(source: str) -> CppKernel:
    """Compile ``extern "C" void kernel(…)`` and return it.

    Args:
        source: A whole program text, without headers of torch's.

    Raises:
        UnsupportedError: There is no compiler, or it fails.

    **Cost**: 0.2 s to a second, or a millisecond where it lies on disk.
    """
    command = _command()
    key = "\0".join([source, shlex.join(command), _compiler_identity(tuple(command))])
    name = f"kernels/{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    if (kernel := _kept(name)) is not None:
        return kernel
    try:
        with tempfile.TemporaryDirectory(prefix="mezzo-") as temporary:
            path = _compiled(command, source, Path(temporary))
            kernel, program = _loaded(path), path.read_bytes()
    except OSError as error:
        raise UnsupportedError(
            "kernels have nowhere to be compiled",
            why=str(error),
            write="TMPDIR=a folder that you can write to",
        ) from error
    if kernel is None:
        raise UnsupportedError(
            "a compiled kernel cannot be loaded",
            where=shlex.join(command[:1]),
            why="it may be for another processor, or this system lets no program run from TMPDIR",
            write="CXX=the path of another C++ compiler, or TMPDIR=a folder from which programs may run",
        )
    try:
        files.keep(name, program + _end(name))
    except (OSError, RuntimeError) as error:
        logger.info("a compiled kernel is not kept for later processes: %s", error)
    return kernel


# What is kept on disk ---------------------------------------------------------------------------------------


def _kept(name: str) -> CppKernel | None:
    """Return the kernel that an earlier process kept, if all of it is there: loading a part would end this process."""
    try:
        path = files.kept(name)
        if path.read_bytes().endswith(_end(name)) and (kernel := _loaded(path)) is not None:
            return kernel
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        logger.info("kernels are compiled anew: %s", error)
        return None
    logger.info("a damaged kernel is compiled anew: %s", name)
    return None


def _end(name: str) -> bytes:
    """Return the last bytes of a kernel's file, which no loader reads."""
    return name.encode()


def _loaded(path: Path) -> CppKernel | None:
    try:
        function: Any = ctypes.CDLL(str(path)).kernel
    except (OSError, AttributeError):
        return None
    function.restype = None
    return CppKernel(function)


# Compiling --------------------------------------------------------------------------------------------------


def compiler() -> str:
    """Return the version of the C++ compiler of kernels, in its own words, as one line.

    Raises:
        UnsupportedError: There is none, or it does not run.
    """
    command = _compiler()
    lines = _run([*command, "--version"]).stdout.splitlines()
    return lines[0] if lines else shlex.join(command)


def _command() -> list[str]:
    return [*_compiler(), *_FLAGS, *(_X86 if os.uname().machine == "x86_64" else ())]


def _compiler() -> list[str]:
    setting = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(setting)
    except ValueError as error:
        raise UnsupportedError(
            "CXX is no command", where=f"CXX={setting}", why=str(error), write="CXX=the path of a C++ compiler"
        ) from error
    command = chosen or [next((path for name in _COMPILERS if (path := shutil.which(name))), "")]
    if sys.platform != "linux" or not shutil.which(command[0]):
        raise UnsupportedError(
            "no C++ compiler for kernels",
            where=f"CXX={shlex.join(chosen)}" if chosen else f"{sys.platform}, {', '.join(_COMPILERS)}",
            write="apt install g++ (or another C++ compiler, and CXX=its path), on Linux",
        )
    return command


@cache
def _compiler_identity(command: tuple[str, ...]) -> str:
    """Return the compiler's version and its meaning of ``native`` on this machine, in its own words."""
    result = _run([*command, "-###", "-x", "c++", "-E", "-"])
    if result.returncode or not result.stderr:  # then what it runs on stands for what it makes of that
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return result.stderr


def _run(command: list[str], source: str = "", folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a compiler, which keeps its temporary files in a folder."""
    environment = os.environ if folder is None else {**os.environ, "TMPDIR": str(folder)}
    try:
        return subprocess.run(command, input=source, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise UnsupportedError(
            "the C++ compiler does not run",
            where=shlex.join(command[:1]),
            why=str(error),
            write="CXX=the path of a C++ compiler, such as g++",
        ) from error


def _compiled(command: list[str], source: str, folder: Path) -> Path:
    """Return the program that the compiler makes in a folder."""
    path = folder / "kernel.so"
    done = _run([*command, "-x", "c++", "-", "-o", str(path)], source, folder)
    if done.returncode == 0:
        return path
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    raise UnsupportedError(
        "a kernel does not compile",
        where=shlex.join(command),
        why=lines[0] if lines else f"exit status {done.returncode}",
        write="CXX=the path of another C++ compiler with OpenMP, such as g++",
    )


# Running ----------------------------------------------------------------------------------------------------

#: Elements for each thread: fewer are done sooner than another thread wakes.
WORTH_A_THREAD: Final = 1 << 14


def threads(elements: int) -> int:
    """Return how many threads a kernel is worth for so many elements."""
    return max(1, min(torch.get_num_threads(), elements // WORTH_A_THREAD))
