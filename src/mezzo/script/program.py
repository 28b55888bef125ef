"""A script and its arguments, run as the interpreter would run it."""

from __future__ import annotations

import io
import os
import runpy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from zipfile import is_zipfile

import mezzo
from mezzo.errors import PolicyError

__all__ = ["Enough", "Program", "own_traceback"]

_OURS: Final = os.path.dirname(os.path.abspath(mezzo.__file__)) + os.sep


class Enough(BaseException):
    """Ends a script that has shown what it was run for: no error, so that what handles errors lets it pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A script, or a module as ``python -m`` runs it, with its arguments.

    Attributes:
        name: The path of the script, or the module's name.
        arguments: What it finds in ``sys.argv[1:]``.
        is_module: Whether it is a module.

    Raises:
        PolicyError: There is no such file.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def __post_init__(self) -> None:
        path = Path(self.name)
        if self.is_module:
            with _as_main(sys.argv, os.getcwd()):
                is_there = _is_found(self.name.partition(".")[0])
        else:
            is_there = (path / "__main__.py").exists() if path.is_dir() else path.exists()
        if not is_there:
            what = "module" if self.is_module else "__main__.py in the folder" if path.is_dir() else "script"
            raise PolicyError(
                f"there is no {what} {self.name!r}",
                why=f"looked up from {os.getcwd()}",
                write="a path that is there, then the script's own options; or -m package.module",
            )

    def run(self) -> None:
        """Run it as ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``; both are put back.

        Raises:
            BaseException: What it raises, ``SystemExit`` included.
        """
        here = os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.name))
        with _as_main([self.name, *self.arguments], here):
            if self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            elif os.path.isfile(self.name) and not (self.name.endswith(".pyc") or is_zipfile(self.name)):
                _run_file(os.path.join(os.getcwd(), self.name))
            else:  # a folder or an archive with a __main__, or what was compiled
                runpy.run_path(self.name, run_name="__main__")


def _is_found(module: str) -> bool:
    """Whether there is a module outside of packages, which is not imported for it."""
    try:
        return module not in ("", "__main__") and find_spec(module) is not None
    except ValueError:  # it is imported, and from nowhere
        return False


def _run_file(path: str) -> None:
    """Run a file as the interpreter does: ``runpy`` would have ``__file__`` and ``sys.argv[0]`` be the same."""
    main = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(main).update(__annotations__={}, __file__=path, __cached__=None, __loader__=loader)
    sys.modules["__main__"] = main
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


@contextmanager
def _as_main(argv: list[str], folder: str) -> Iterator[None]:
    words, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = argv
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = words, path, main


def own_traceback(error: BaseException) -> types.TracebackType | None:
    """Return the traceback of what a script has raised as it would be without mezzo; its causes get theirs, too.

    The frames that have run the script go, and those of mezzo inside of it, unless mezzo itself has raised the error.
    """
    known = set[int]()
    found: BaseException | None = error
    while found is not None and id(found) not in known:
        known.add(id(found))
        found.__traceback__ = _without(found.__traceback__)
        found = found.__cause__ or found.__context__
    return error.__traceback__


def _without(traceback: types.TracebackType | None) -> types.TracebackType | None:
    frames = list[types.TracebackType]()
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    runners = [number for number, each in enumerate(frames) if _runs(each)]
    first = runners[-1] + 1 if runners and _is_ours(frames[0]) else 0
    keeps_ours = _is_ours(frames[-1]) if frames else False
    kept = None
    for each in reversed(frames[first:]):
        if keeps_ours or not _is_ours(each):
            kept = types.TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _runs(traceback: types.TracebackType) -> bool:
    return traceback.tb_frame.f_code is _run_file.__code__ or _file(traceback) == "<frozen runpy>"


def _is_ours(traceback: types.TracebackType) -> bool:
    return _file(traceback).startswith(_OURS)


def _file(traceback: types.TracebackType) -> str:
    return traceback.tb_frame.f_code.co_filename
