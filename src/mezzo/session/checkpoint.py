"""Writing a checkpoint so that whatever happens meanwhile, the last complete one is there."""

from __future__ import annotations

import os
from typing import Any

import torch

from mezzo.files import whole

__all__ = ["save"]


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Write what ``torch.save`` writes, completely or not at all.

    The file is written beside its place, handed to the disk, and renamed: a process killed at any moment, or a full
    disk, leaves the old checkpoint as it was. ``torch.load(path, weights_only=True)`` reads it. What a killed process
    left half written is removed by the next call for the same path. Several threads or processes may save to one
    path: the last one to finish stays.

    Args:
        state: What ``torch.save`` takes: most often the state dicts of model, optimizer and session, side by side.
        path: The file, or a symbolic link to it. Its folder must exist; permissions and group of an old file are kept,
            also while it is written.

    Raises:
        OSError: The folder does not exist or cannot be written, the disk is full, or the path is that of something
            else than a file, such as a device. Whatever is raised, ``torch.save``'s own errors included, the old
            checkpoint is as it was.

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
    with whole(path) as file:
        torch.save(state, file)
