"""Files that appear whole or not at all, and the folder of what mezzo keeps for later processes.

Two kinds of files are written here. Those that a user names appear under their name only once they are complete
(:func:`whole`). Those of the cache (:func:`keep`, :func:`kept`) save the next process some work: they are read only
where nobody but this user and root can have put them, for one of them is a program.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from mezzo.errors import message

if sys.platform != "win32":  # which has no such locks: what a dead process left there stays
    import fcntl

__all__ = [
    "cache_folder", "growing", "is_partial", "keep", "kept", "opened", "private_folder", "regular_or_new", "whole",
]  # fmt: skip

#: A partial file's name is at most this long with its 18 characters around: file systems that encrypt names take 143.
_LONGEST_NAME: Final = 100
#: Not so on Windows, where nothing is kept: what others could have put there cannot be told.
_HAS_OWNERS: Final = hasattr(os, "geteuid")


# Files that a user names ------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Write a file that has its name only once it is complete and on the disk.

    Args:
        path: The file, or a symbolic link to it. Mode, owner and group of an old file are kept, as far as this user
            may set them; a new one has those of any new file.

    Yields:
        The stream to write to. If the block raises, the old file is as it was and the new one is gone.

    Raises:
        OSError: There is no folder for it, or something else is there than a file; or it cannot be written, whatever
            the block made of that error.
    """
    target, old = regular_or_new(path)
    _remove_abandoned(target)
    with _beside(target, 0o666 if old is None else 0o600) as descriptor:
        file = _File(descriptor, target)
        try:
            stream = io.BufferedWriter(file)
            yield stream
            stream.flush()
            if old is not None:
                _hand_on(old, descriptor)
        except Exception as error:
            if file.fault is not None and file.fault is not error:
                raise file.fault from error  # what a serializer says of a failed write is no help
            raise
        finally:
            with contextlib.suppress(OSError):
                file.close()


@contextlib.contextmanager
def _beside(target: Path, mode: int) -> Iterator[int]:
    """Create a file beside another, which takes its name when the block ends and the disk has it.

    Args:
        target: The other file.
        mode: Of the new one.

    Yields:
        The new file's descriptor. If the block raises, the file is gone.
    """
    beside, descriptor = _created(target, mode)
    try:
        yield descriptor
        os.fsync(descriptor)
        os.replace(beside, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = str(target)
        raise
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # the rename itself, where the system lets a folder be synced
        above = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(above)
        finally:
            os.close(above)


def _created(target: Path, mode: int) -> tuple[str, int]:
    """Create a file that nobody else writes to, locked for as long as it is open."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    while True:
        name = str(target.with_name(f".{_label(target)}.{secrets.token_hex(4)}.partial"))
        descriptor = os.open(name, flags, mode)
        if not _lock(descriptor) or os.path.exists(name):
            return name, descriptor
        os.close(descriptor)  # taken for abandoned, and removed, before it was locked


def is_partial(name: str) -> bool:
    """Say whether a file is one that a killed process left half written."""
    return re.fullmatch(r"\..+\.[0-9a-f]{8}\.partial", name) is not None


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
    what = f"a file is to be written, and this is {_kind(mode)}"
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(
            message(what, where=str(target), write=f"the path of a file in it, {str(target / 'NAME')!r}")
        )
    if not stat.S_ISREG(mode):
        why = "a new file under its name would replace it"
        raise FileExistsError(message(what, where=str(target), why=why, write="the path of a regular file, or of none"))
    return target, facts


def growing(path: Path) -> IO[str]:
    """Open a file that one writer alone adds lines to, and empty it; each line is handed to the system at once.

    Raises:
        OSError: It cannot be written, or another writer has it open, in this process or another.
    """
    file = path.open("a", buffering=1, encoding="utf-8")
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            what, why = "a file is to be written, and another writer has it open", "their lines would be mixed"
            raise FileExistsError(message(what, where=str(path), why=why, write="a path for each writer")) from None
        except OSError:
            pass  # a file system without locks
    file.truncate(0)
    file.seek(0)
    return file


def opened(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading; nothing is waited for that a pipe or a device might send.

    Raises:
        OSError: There is no such file, or it is not a regular one.
    """
    name = os.fspath(path)
    _require_regular(os.stat(name).st_mode, name)
    return _reader(name)


def _reader(name: str, flags: int = 0) -> io.BufferedReader:
    descriptor = os.open(name, os.O_RDONLY | flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _require_regular(os.fstat(descriptor).st_mode, name)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_regular(mode: int, name: str) -> None:
    if not stat.S_ISREG(mode):
        kind = IsADirectoryError if stat.S_ISDIR(mode) else OSError
        raise kind(message(f"a file is to be read, and this is {_kind(mode)}", where=name, write="the path of a file"))


def _kind(mode: int) -> str:
    names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return (names | dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device")).get(stat.S_IFMT(mode), "no regular file")


class _File(io.FileIO):
    """A file that names itself in the errors of its writes, and remembers the first."""

    def __init__(self, descriptor: int, target: Path) -> None:
        super().__init__(descriptor, "r+", closefd=False)
        self.fault: OSError | None = None
        self._target = str(target)

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = self._target
            self.fault = self.fault or error
            raise


def _hand_on(old: os.stat_result, descriptor: int) -> None:
    """Give a new file what the old one allowed, and to nobody more."""
    if sys.platform == "win32":
        return
    mode = stat.S_IMODE(old.st_mode)
    for owner, group in ((old.st_uid, old.st_gid), (-1, old.st_gid)):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, owner, group)
            break
    else:  # another group would get what the old file's group had
        mode &= ~stat.S_IRWXG
    os.fchmod(descriptor, mode)


def _remove_abandoned(target: Path) -> None:
    """Remove what dead processes left half written: no living one holds the lock of such a file."""
    for beside in target.parent.glob(f".{glob.escape(_label(target))}.{'[0-9a-f]' * 8}.partial"):
        with contextlib.suppress(OSError):
            descriptor = os.open(beside, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and _lock(descriptor, wait=False):
                    beside.unlink()
            finally:
                os.close(descriptor)


def _label(target: Path) -> str:
    """Return what a partial file is called after: its target's name, or a digest of a long one."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= _LONGEST_NAME else hashlib.sha256(name).hexdigest()[:32]


def _lock(descriptor: int, *, wait: bool = True) -> bool:
    """Lock an open file until it is closed or its process dies; false where that cannot be."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
    return False


# The cache ----------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder of the cache; it need not exist.

    Raises:
        RuntimeError: If this user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "mezzo"


def kept(name: str) -> bytes:
    """Read a file of the cache that only this user, or root, can have written.

    Args:
        name: Its path below :func:`cache_folder`.

    Returns:
        All of it, read once: what is checked in these bytes is what is used.

    Raises:
        OSError: There is no such file; or another user could have put it there (PermissionError), since the file or
            a folder on the way to it is theirs, or they may write to it.
        RuntimeError: As :func:`cache_folder`.
    """
    path = _trusted((cache_folder() / name).parent) / Path(name).name
    with _reader(str(path), os.O_NOFOLLOW) as file:
        _require_ours(os.fstat(file.fileno()), path)
        return file.read()


def keep(name: str, data: bytes) -> None:
    """Write a file of the cache, for this user alone: beside its place, to the disk, and renamed.

    Args:
        name: Its path below :func:`cache_folder`; folders on the way are made.
        data: All of it.

    Raises:
        OSError: It cannot be written, or another user could exchange it.
        RuntimeError: As :func:`cache_folder`.
    """
    path = _trusted((cache_folder() / name).parent, make=True) / Path(name).name
    with _beside(path, 0o600) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(data)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a temporary folder in which no other user can exchange anything; remove it in the end.

    Raises:
        OSError: Neither the system's temporary folder nor the cache is such a place.
    """
    try:
        base = _trusted(Path(tempfile.gettempdir()))
    except OSError:
        try:
            base = _trusted(cache_folder(), make=True)
        except RuntimeError as error:
            raise OSError(errno.ENOENT, str(error)) from error
    path = Path(tempfile.mkdtemp(prefix="mezzo-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _trusted(path: Path, *, make: bool = False) -> Path:
    """Return where a folder really is, if nobody but this user and root can exchange it or write to it.

    What is looked at lies in folders that have been looked at before: once it is found to be ours, nobody else can
    put another in its place. A symbolic link is followed where only this user or root can have made it.
    """
    if not _HAS_OWNERS:
        raise PermissionError(errno.EACCES, "this system cannot tell whose folders these are", str(path))
    for place in (*reversed(path.parents), path):
        if make and not os.path.lexists(place):
            with contextlib.suppress(FileExistsError):
                place.mkdir(0o700)
        facts = place.lstat()
        _require_ours(facts, place)
        if stat.S_ISLNK(facts.st_mode):
            place.stat()  # raises where links lead in a circle
            return _trusted(place.parent / os.readlink(place) / path.relative_to(place), make=make)
    return path


def _require_ours(facts: os.stat_result, path: Path) -> None:
    """Refuse what is another user's, or what others may write to; in a sticky folder only an owner moves files."""
    if facts.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EACCES, f"it belongs to another user, {facts.st_uid}", str(path))
    is_sticky = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX
    if facts.st_mode & 0o022 and not is_sticky and not stat.S_ISLNK(facts.st_mode):
        raise PermissionError(errno.EACCES, "other users may write to it", str(path))
