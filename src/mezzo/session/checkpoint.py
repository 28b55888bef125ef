"""Writing a checkpoint so that whatever happens meanwhile, the last complete one is there."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mezzo.errors import message

if sys.platform != "win32":  # which has no such locks: what a dead process left there stays
    import fcntl

__all__ = ["save"]


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Write what ``torch.save`` writes, completely or not at all.

    The file is written beside its place, handed to the disk, and renamed: a process killed at any moment, or a full
    disk, leaves the old checkpoint as it was. ``torch.load(path, weights_only=True)`` reads it. What a killed process
    left half written is removed by the next call for the same path. Several threads or processes may save to one
    path: the last one to finish stays.

    Args:
        state: What ``torch.save`` takes: most often the state dicts of model, optimizer and session, side by side.
        path: The file, or a symbolic link to it. Its folder must exist; permissions of an old file are kept.

    Raises:
        OSError: The folder does not exist or cannot be written. Whatever is raised, ``torch.save``'s own errors
            included, the old checkpoint is as it was.

    **Cost**: room for two checkpoints while it writes, and one wait until the disk has the new one.

    Example:
        >>> import mezzo, torch, tempfile, os
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O1,emulate=true")
        >>> path = os.path.join(tempfile.mkdtemp(), "last.pt")
        >>> parts = {"model": model, "optimizer": optimizer, "amp": amp}
        >>> mezzo.save({name: part.state_dict() for name, part in parts.items()}, path)
        >>> sorted(torch.load(path, weights_only=True))
        ['amp', 'model', 'optimizer']
    """
    target = Path(os.path.realpath(path))
    _check(target)
    _remove_abandoned(target)
    with _created_beside(target) as beside:
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            beside.chmod(target.stat().st_mode & 0o7777)
        beside.replace(target)
    _flush_folder(target.parent)


def _check(target: Path) -> None:
    if not target.parent.is_dir():
        raise FileNotFoundError(
            message(
                "there is no folder to save in",
                where=str(target.parent),
                write=f"os.makedirs({str(target.parent)!r}, exist_ok=True)",
            )
        )
    if target.is_dir():
        raise IsADirectoryError(
            message(
                "a checkpoint is a file, and this is a folder",
                where=str(target),
                write=f"mezzo.save(state, {str(target / 'last.pt')!r})",
            )
        )


@contextlib.contextmanager
def _created_beside(target: Path) -> Iterator[Path]:
    """Create a file that nobody else writes to, locked for as long as it is written; remove it on failure."""
    while True:
        beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        descriptor = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        if not _lock(descriptor) or beside.exists():
            break
        os.close(descriptor)  # taken for abandoned, and removed, before it was locked
    if sys.platform == "win32":
        os.close(descriptor)
    try:
        yield beside
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    finally:
        if sys.platform != "win32":
            os.close(descriptor)


def _remove_abandoned(target: Path) -> None:
    """Remove what dead processes left half written: no living one holds the lock of such a file."""
    for beside in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}.partial"):
        with contextlib.suppress(OSError):
            descriptor = os.open(beside, os.O_RDWR)
            try:
                if _lock(descriptor, wait=False):
                    beside.unlink()
            finally:
                os.close(descriptor)


def _lock(descriptor: int, *, wait: bool = True) -> bool:
    """Lock an open file until it is closed or its process dies; false where that cannot be."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
    return False


def _flush_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
