"""A script and its arguments, run as the interpreter would run it, and names of torch that are replaced meanwhile."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import os
import re
import runpy
import statistics
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from zipfile import is_zipfile

import mezzo
from mezzo.errors import PolicyError
from mezzo.files import jsonable, made_of
from mezzo.patches import patch

_OURS: Final = os.path.dirname(os.path.abspath(mezzo.__file__)) + os.sep


class Enough(BaseException):
    """Raised to end a script early. It is no ``Exception``, so that handlers of errors in the script let it pass."""


class Seams(contextlib.ExitStack):
    """Attributes that are replaced until the block is left, or ``close`` is called."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute.

        Args:
            owner: The module or class that has it.
            name: Its name.
            value: Its new value.
        """
        self.callback(patch(owner, name, value))


def is_script() -> bool:
    """Whether the function that has called the caller is neither torch's nor mezzo's."""
    module = str(sys._getframe(2).f_globals.get("__name__", ""))
    return module.partition(".")[0] not in ("torch", "mezzo")


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
            missing = "module" if self.is_module else "__main__.py in the folder" if path.is_dir() else "script"
            raise PolicyError(
                f"there is no {missing} {self.name!r}",
                why=f"looked up from {os.getcwd()}",
                write="a path that is there, then the script's own options; or -m package.module",
            )

    @property
    def file(self) -> Path | None:
        """The file that is run, found without imports; ``None`` where the program is no file."""
        if not self.is_module:
            path = Path(self.name)
            return path / "__main__.py" if path.is_dir() else path
        with _as_main(sys.argv, os.getcwd()):
            first, *rest = self.name.split(".")
            spec = find_spec(first)
            for number in range(len(rest) + 1):
                if spec is None or spec.submodule_search_locations is None:
                    break
                name = ".".join([first, *rest, "__main__"][: number + 2])
                spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
        return Path(spec.origin) if spec is not None and spec.origin else None

    def run(self) -> None:
        """Run the script as ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``; both are restored.

        Raises:
            BaseException: What the script raises, ``SystemExit`` included.
        """
        here = os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.name))
        with _as_main([self.name, *self.arguments], here):
            if self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            elif os.path.isfile(self.name) and not (self.name.endswith(".pyc") or is_zipfile(self.name)):
                _run_file(os.path.join(os.getcwd(), self.name))
            else:  # a folder or an archive with a __main__, or a compiled file
                runpy.run_path(self.name, run_name="__main__")


def _is_found(module: str) -> bool:
    """Whether a top-level module exists; nothing is imported."""
    try:
        return module not in ("", "__main__") and find_spec(module) is not None
    except ValueError:  # it is imported already, and has no spec
        return False


def _run_file(path: str) -> None:
    """Run a file as the interpreter does. After ``runpy``, ``pickle`` would no longer find its classes."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__file__=path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


#: Names in a script that says its options outside its files: by words it reads itself, or by the fields of a library.
_OPEN_ENDED: Final = {"argv", "HfArgumentParser", "LightningCLI"}


def options_of(script: Path) -> Callable[[str], bool]:
    """Return whether a script has an option such as ``--seeds``, as far as its files say; in doubt, it has.

    A name counts if it is a text, a parameter or an annotated field (parsers are made of each of them) in the script or
    in a module beside it that it imports; of a text with spaces, as docopt reads one, what begins with dashes. argparse
    takes the beginning of an option for it, too.

    Args:
        script: Its file, which is read and not run.
    """
    names, files, waiting = set[str](), set[Path](), {script}
    while waiting:
        files.add(path := waiting.pop())
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):  # a folder, an archive, or not Python
            return lambda option: True
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(text)):
                    names.update([text] if len(text.split()) == 1 else re.findall(r"--[\w-]+", text))
                case ast.arg(arg=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in _OPEN_ENDED:
                    return lambda option: True
            stems = [root / name.replace(".", "/") for name in _imported(node) for root in (script.parent, path.parent)]
            imported_files = {
                file for stem in stems for file in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")
            }
            waiting |= {file for file in imported_files if file.is_file()} - files
    option_names = [name.lstrip("-").replace("_", "-") for name in names]
    return lambda option: any(name.startswith(option.partition("=")[0].lstrip("-")) for name in option_names)


def _imported(node: ast.AST) -> list[str]:
    """Return the modules that an import may mean, seen from the script's folder."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        package = node.module or ""
        return [*filter(None, [package]), *(f"{package}.{alias.name}".lstrip(".") for alias in node.names)]
    return []


@contextlib.contextmanager
def _as_main(argv: list[str], folder: str) -> Iterator[None]:
    words, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = argv
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = words, path, main


def own_traceback(error: BaseException) -> types.TracebackType | None:
    """Return the traceback of what a script has raised, without the frames that have run the script."""
    start = frame = error.__traceback__
    while frame is not None:
        code, frame = frame.tb_frame.f_code, frame.tb_next
        if code is _run_file.__code__ or code.co_filename == "<frozen runpy>":
            start = frame
    while start is not None and start.tb_next and start.tb_frame.f_code.co_filename.startswith(_OURS):
        start = start.tb_next
    return start


# The record of each step of a run, and the file that holds them.

#: The file with one line of JSON a step, in a folder of results.
METRICS: Final = "metrics.jsonl"
#: Steps at the start that are not timed: allocators, thread pools and kernel choices settle in them.
UNTIMED_STEPS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step, as one line of ``metrics.jsonl``.

    Attributes:
        step: From 1.
        loss: The training loss before the step, unscaled.
        scale: The loss scale used in this step.
        skipped: Whether the weights were left alone because a gradient was not finite.
        grad_norm: Global norm of the unscaled gradients before clipping.
        ms: Wall time since the step before, in milliseconds.
    """

    step: int
    loss: float
    scale: float
    skipped: bool
    grad_norm: float
    ms: float

    @property
    def line(self) -> str:
        """The record as a line of JSON, with its end; numbers that are not finite are texts."""
        return f"{json.dumps(jsonable(dataclasses.asdict(self)), allow_nan=False)}\n"


def read_steps(path: Path) -> list[StepRecord]:
    """Read a file of :attr:`StepRecord.line`; of one whose writer was killed, all whole lines."""
    lines = path.read_text().splitlines(keepends=True)
    return [made_of(StepRecord, json.loads(line)) for line in lines if line.endswith("\n")]


def step_ms(records: Sequence[StepRecord]) -> tuple[float, float, float] | None:
    """Return the 10th, 50th and 90th percentile of the time of a step; ``None`` for a run too short to have one."""
    times = [record.ms for record in records if record.step > UNTIMED_STEPS]
    if len(times) < 2:
        return None
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return tenths[0], statistics.median(times), tenths[-1]


def never_trains(program: str, left_alone: Mapping[str, str]) -> PolicyError:
    """Return the error of a script without a step, with what was left alone and why."""
    return PolicyError(
        f"{program} never trains: no optimizer over a module's parameters took a step",
        why="\n".join(f"{part}: {why}" for part, why in left_alone.items()),
        write="a script that calls loss.backward() and optimizer.step()",
    )


def require_one_process(verb: str) -> None:
    """Refuse a verb that works in one process where several were started.

    Raises:
        PolicyError: They would do the same work, and write the same files.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise PolicyError(
            f"mezzo {verb} works in one process, and {size} were started",
            where=f"rank {os.environ.get('RANK', '0')} of {size}",
            why="all of them would do the same, and write the same files",
            write=f"mezzo {verb} …, without torchrun",
        )
