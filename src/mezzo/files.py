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

__all__ = ["cache_folder", "is_partial", "keep", "kept", "opened", "private_folder", "regular_or_new", "whole"]

#: A partial file's name is at most this long with its 18 characters around: file systems that encrypt names take 143.
_LONGEST_NAME: Final = 100
_LINKS: Final = 40  # as the kernel follows them
#: Not so on Windows, where nothing is kept: what others could have put there cannot be told.
_HAS_OWNERS: Final = os.open in os.supports_dir_fd and hasattr(os, "geteuid")


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
        OSError: As :func:`regular_or_new`; or the file cannot be written, whatever the block made of that error.
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
def _beside(target: Path, mode: int, folder: int | None = None) -> Iterator[int]:
    """Create a file beside another, which takes its name and place when the block ends and the disk has it.

    Args:
        target: The other file.
        mode: Of the new one.
        folder: The open folder of both. Without it the path is used, which may come to lead to another place.

    Yields:
        The new file's descriptor. If the block raises, the file is gone.
    """
    place = str(target) if folder is None else target.name
    beside, descriptor = _created(os.path.join(os.path.dirname(place), f".{_label(target)}"), mode, folder)
    try:
        yield descriptor
        os.fsync(descriptor)
        os.replace(beside, place, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(beside, dir_fd=folder)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = str(target)
        raise
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # the rename itself, where the system lets a folder be synced
        above = os.open(target.parent, os.O_RDONLY) if folder is None else os.dup(folder)
        try:
            os.fsync(above)
        finally:
            os.close(above)


def _created(start: str, mode: int, folder: int | None) -> tuple[str, int]:
    """Create a file that nobody else writes to, locked for as long as it is open."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    while True:
        name = f"{start}.{secrets.token_hex(4)}.partial"
        descriptor = os.open(name, flags, mode, dir_fd=folder)
        if folder is not None or not _lock(descriptor) or os.path.exists(name):
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
    text, target = os.fspath(path), Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(
            message(
                "there is no folder to save in",
                where=str(target.parent),
                write=f"os.makedirs({str(target.parent)!r}, exist_ok=True)",
            )
        )
    try:
        facts = os.stat(target)
    except FileNotFoundError:
        facts = None
    if text.endswith(os.sep) or (facts is not None and stat.S_ISDIR(facts.st_mode)):
        raise IsADirectoryError(
            message(
                "a file is to be written, and this is a folder", where=str(target), write=repr(str(target / "last.pt"))
            )
        )
    if facts is not None and not stat.S_ISREG(facts.st_mode):
        raise FileExistsError(
            message(
                f"a file is to be written, and this is {_kind(facts.st_mode)}",
                where=str(target),
                why="a new file under its name would replace it",
                write="the path of a regular file, or of none",
            )
        )
    return target, facts


def opened(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading; nothing is waited for that a pipe or a device might send.

    Raises:
        OSError: There is no such file, or it is not a regular one.
    """
    name = os.fspath(path)
    _require_regular(os.stat(name).st_mode, name)
    descriptor = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
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
    kinds = {
        stat.S_ISDIR: "a folder",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
    }
    return next((words for fits, words in kinds.items() if fits(mode)), "no regular file")


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
    path = cache_folder() / name
    with _trusted(path.parent) as folder:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path.name, flags, dir_fd=folder)
        try:
            facts = os.fstat(descriptor)
            _require_regular(facts.st_mode, str(path))
            _require_ours(facts, str(path))
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)


def keep(name: str, data: bytes) -> None:
    """Write a file of the cache, for this user alone: beside its place, to the disk, and renamed.

    Args:
        name: Its path below :func:`cache_folder`; folders on the way are made.
        data: All of it.

    Raises:
        OSError: It cannot be written, or another user could exchange it.
        RuntimeError: As :func:`cache_folder`.
    """
    path = cache_folder() / name
    with (
        _trusted(path.parent, make=True) as folder,
        _beside(path, 0o600, folder) as descriptor,
        open(descriptor, "wb", closefd=False) as file,
    ):
        file.write(data)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a temporary folder in which no other user can exchange anything; remove it in the end.

    Raises:
        OSError: Neither the system's temporary folder nor the cache is such a place.
    """
    with contextlib.ExitStack() as stack:
        try:
            base = Path(tempfile.gettempdir())
            stack.enter_context(_trusted(base))
        except OSError:
            try:
                base = cache_folder()
            except RuntimeError as error:
                raise OSError(errno.ENOENT, str(error)) from error
            stack.enter_context(_trusted(base, make=True))
        path = Path(tempfile.mkdtemp(prefix="mezzo-", dir=base))
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield path


@contextlib.contextmanager
def _trusted(path: Path, *, make: bool = False) -> Iterator[int]:
    """Open a folder, component by component, which nobody but this user and root can exchange or write to.

    Each component is opened below the one before it, which has been checked already: nothing can be exchanged between
    the check and the use. A symbolic link is followed where only this user or root can have made it.
    """
    if not _HAS_OWNERS:
        raise PermissionError(errno.EACCES, "this system cannot tell whose folders these are", str(path))
    walked, rest, links = "/", [*reversed(path.parts[1:])], 0
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open("/", flags)
    try:
        _require_ours(os.fstat(folder), walked)
        while rest:
            part = rest.pop()
            try:
                facts = os.stat(part, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=folder)
                facts = os.stat(part, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISLNK(facts.st_mode):
                _require_ours(facts, os.path.join(walked, part))
                links += 1
                if links > _LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                place = Path(os.readlink(part, dir_fd=folder))
                rest += reversed(place.parts[1:] if place.is_absolute() else place.parts)
                if not place.is_absolute():
                    continue
                walked, part = "/", "/"
            else:
                walked = os.path.join(walked, part)
            below = os.open(part, flags, dir_fd=folder)
            os.close(folder)
            folder = below
            _require_ours(os.fstat(folder), walked)
        yield folder
    finally:
        os.close(folder)


def _require_ours(facts: os.stat_result, path: str) -> None:
    """Refuse what is another user's, or what others may write to; in a sticky folder only an owner moves files."""
    if facts.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EACCES, f"it belongs to another user, {facts.st_uid}", path)
    is_sticky = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX
    if facts.st_mode & 0o022 and not is_sticky and not stat.S_ISLNK(facts.st_mode):
        raise PermissionError(errno.EACCES, "other users may write to it", path)
