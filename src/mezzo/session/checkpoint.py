"""Writing a checkpoint so that whatever happens meanwhile, the last complete one is there."""

from __future__ import annotations

import contextlib
import glob
import os
import platform
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["save"]

_HOST: Final = platform.node()


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Write what ``torch.save`` writes, completely or not at all.

    The file is written beside its place, handed to the disk, and renamed: a process killed at any moment, or a full
    disk, leaves the old checkpoint as it was. ``torch.load(path, weights_only=True)`` reads it.

    Args:
        state: What ``torch.save`` takes: most often the state dicts of model, optimizer and session, side by side.
        path: The file. Its folder must exist.

    Raises:
        OSError: The folder does not exist or cannot be written; nothing was changed.

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
    target = Path(path)
    _remove_abandoned(target)
    beside = target.with_name(f".{target.name}.{_HOST}-{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            beside.chmod(target.stat().st_mode & 0o7777)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def _remove_abandoned(target: Path) -> None:
    """Remove what processes of this machine that died while writing the same checkpoint left behind."""
    for beside in target.parent.glob(f".{glob.escape(target.name)}.{glob.escape(_HOST)}-*.partial"):
        writer = beside.name.removesuffix(".partial").rpartition("-")[2]
        if writer.isdigit() and not _is_alive(int(writer)):
            beside.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
