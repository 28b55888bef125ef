"""Files that appear whole or not at all, values as JSON in them, and the folder of what later processes find.

Files that a user names appear under their name only once they are complete (:func:`whole`). Those of the cache
(:func:`keep`, :func:`kept`) save the next process some work; they lie in one folder that is for this user alone, for
one of them is a program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
import json
import math
import os
import platform
import re
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Any, Final, Union, get_args, get_origin, get_type_hints

from mezzo.errors import message

try:
    import fcntl
except ImportError:  # what was left stays where no process can be told to be dead
    fcntl = None  # type: ignore[assignment]

#: Characters of a name that its partial file is called after: with 36 more they fit any file system.
_LONGEST_NAME: Final = 50
#: The name of a partial file, with its two words for the machine.
_PARTIAL: Final = re.compile(r"\..+\.([0-9a-f]{8})\.([0-9a-f]{8})\.[0-9a-f]{8}\.partial", re.DOTALL)
_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


# Files that a user names ------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Write a file that has its name only once it is complete and on the disk.

    Args:
        path: The file, or a symbolic link to it. The mode of an old file is kept; a new one has that of any new file.

    Yields:
        The stream to write to. If the block raises, the old file is as it was and the new one is gone.

    Raises:
        OSError: There is no folder for it, or something else is there than a file; or it cannot be written, whatever
            the block made of that error.
    """
    target, old = regular_or_new(path)
    with _partial_file(target, 0o666 if old is None else 0o600) as file:
        yield file
        if old is not None and hasattr(os, "fchmod"):
            os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))


@contextlib.contextmanager
def _partial_file(target: Path, mode: int) -> Iterator[IO[bytes]]:
    """Create a file beside another, which takes its name when the block ends and the disk has it."""
    _remove_left(target.parent)
    with contextlib.ExitStack() as until_renamed:
        partial, descriptor = _locked_partial(target, mode)
        if fcntl is not None:
            until_renamed.callback(os.close, os.dup(descriptor))  # which keeps the lock
        raw = _File(descriptor, target)
        try:
            with raw, io.BufferedWriter(raw) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            if raw.fault is not None and raw.fault is not error and isinstance(error, Exception):
                raise raw.fault from error  # what a serializer says of a failed write is no help
            if isinstance(error, OSError) and error.filename is None and error.errno is not None:
                error.filename = str(target)
            raise
    with contextlib.suppress(OSError):  # the rename itself, where the system lets a folder be synced
        above = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(above)
        finally:
            os.close(above)


def _locked_partial(target: Path, mode: int) -> tuple[Path, int]:
    """Create a file beside another, locked for as long as this process has it open.

    A lock ends with its process, however that ends, and no other process can be taken for it. That a machine's name is
    in the file's is for file systems that keep the locks of one machine from others.
    """
    while True:
        name = ".".join((target.name[:_LONGEST_NAME], *_here(), secrets.token_hex(4)))
        partial = target.with_name(f".{name}.partial")
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0), mode)
        # Until it is locked, another process may take it for what a dead one has left.
        if _lock(descriptor) is not False and partial.exists():
            return partial, descriptor
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Lock an open file, and say whether it is; ``None`` where the file system has no locks."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        pass
    return None


def _remove_left(folder: Path) -> None:
    """Remove what processes of this machine that were killed while they wrote have left in a folder."""
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(folder) if name.endswith(".partial")]
        for match in filter(None, map(_PARTIAL.fullmatch, names)):
            if not {*match.groups()} & {*_here()}:
                continue
            with contextlib.suppress(OSError):  # it is gone, or another user's
                descriptor = os.open(folder / match[0], os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
                try:
                    if _lock(descriptor):
                        os.unlink(folder / match[0])
                finally:
                    os.close(descriptor)


@functools.cache
def _here() -> tuple[str, str]:
    """Return two words for this machine: for its name, and for the start of its kernel, which containers share."""
    name = platform.node()
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        started = name
    return f"{zlib.crc32(name.encode()):08x}", f"{zlib.crc32(started.encode()):08x}"


class _File(io.FileIO):
    """A file that names itself in the errors of its writes, and remembers the first."""

    def __init__(self, descriptor: int, target: Path) -> None:
        super().__init__(descriptor, "r+")
        self.fault: OSError | None = None
        self._target = str(target)

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = self._target
            self.fault = self.fault or error
            raise


def regular_or_new(path: str | os.PathLike[str]) -> tuple[Path, os.stat_result | None]:
    """Return where a path leads to, and the facts of the regular file that is there, if one is.

    Raises:
        OSError: There is no folder for it, or something else is there: a folder, a device, a pipe.
    """
    target, facts = Path(os.path.realpath(path)), None
    if not target.parent.is_dir():
        write = f"os.makedirs({str(target.parent)!r}, exist_ok=True)"
        raise FileNotFoundError(message("there is no folder to save in", where=str(target.parent), write=write))
    with contextlib.suppress(FileNotFoundError):
        facts = os.stat(target)
    mode = stat.S_IFDIR if os.fspath(path).endswith(os.sep) else facts.st_mode if facts else stat.S_IFREG
    problem, where = f"a file is to be written, and this is {_kind(mode)}", str(target)
    if stat.S_ISDIR(mode):
        write = f"the path of a file in it, {str(target / 'NAME')!r}"
        raise IsADirectoryError(message(problem, where=where, write=write))
    if not stat.S_ISREG(mode):
        why = "a new file under its name would replace it"
        raise FileExistsError(message(problem, where=where, why=why, write="the path of a regular file, or of none"))
    return target, facts


def opened(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading; a pipe or a device, which might send nothing, is refused.

    Raises:
        OSError: There is no such file, or it is not a regular one.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        error, problem = IsADirectoryError if stat.S_ISDIR(mode) else OSError, "a file is to be read, and this is"
        raise error(message(f"{problem} {_kind(mode)}", where=os.fspath(path), write="the path of a file"))
    return open(path, "rb")


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


# The cache ----------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder of the cache; it need not exist.

    Raises:
        RuntimeError: If this user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "mezzo"


def kept(name: str) -> Path:
    """Return where a file of the cache is.

    Args:
        name: Its path below :func:`cache_folder`.

    Returns:
        Its path; there may be no such file.

    Raises:
        OSError: There is no folder, or it is not for this user alone (PermissionError).
        RuntimeError: As :func:`cache_folder`.
    """
    folder = cache_folder()
    facts = folder.stat()
    if not hasattr(os, "geteuid") or facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise PermissionError(errno.EACCES, "it is not for this user alone", str(folder))
    return folder / name


def keep(name: str, data: bytes) -> Path:
    """Write a file of the cache, in a folder for this user alone, and return where it is.

    Args:
        name: Its path below :func:`cache_folder`; folders on the way are made.
        data: All of it.

    Raises:
        OSError: It cannot be written, or the folder is another user's.
        RuntimeError: As :func:`cache_folder`.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with _partial_file(path, 0o600) as file:
        file.write(data)
    return path


# Values as JSON, in text and in files: numbers that JSON lacks are texts.


def jsonable(value: Any) -> Any:
    """Replace what JSON cannot write: non-finite numbers by their names, tuples by lists.

    Example:
        >>> jsonable({"loss": float("nan"), "ms": (1.5, float("-inf"))})
        {'loss': 'nan', 'ms': [1.5, '-inf']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner) for inner in value]
    return value


def made_of(annotation: Any, value: Any) -> Any:
    """Return the value that :func:`jsonable` has made JSON's types of.

    Args:
        annotation: The value's type: a dataclass, or the annotation of a field.
        value: Mappings for dataclasses, lists for tuples; a dataclass's own objects stay.

    Raises:
        TypeError: A field is missing, or is none of the dataclass.
        ValueError: A text is no number.

    Example:
        >>> made_of(tuple[float, ...], [1.5, "nan", "-inf"])
        (1.5, nan, -inf)
    """
    outer, inner = get_origin(annotation), get_args(annotation)
    if outer in (UnionType, Union):
        return None if value is None else made_of(next(one for one in inner if one is not NoneType), value)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        types = _types(annotation)
        if isinstance(value, annotation):
            return value
        return annotation(**{name: made_of(types.get(name), field) for name, field in value.items()})
    if outer is tuple:
        return tuple(made_of(inner[0], item) for item in value)
    if outer is Mapping:
        return {key: made_of(inner[1], item) for key, item in value.items()}
    return float(value) if annotation is float else value


_types = functools.cache(get_type_hints)


def json_text(value: Any) -> str:
    """Write a value as JSON for people and programs: indented, any letters as they are.

    Example:
        >>> print(json_text({"ε": float("nan")}))
        {
          "ε": "nan"
        }
    """
    return json.dumps(jsonable(value), indent=2, allow_nan=False, ensure_ascii=False)


def save_json(value: Any, path: str | os.PathLike[str]) -> None:
    """Write a value as JSON into a file, which appears whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    with atomic_file(path) as file:
        file.write(f"{json_text(value)}\n".encode())
