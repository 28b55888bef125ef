"""Checkpoints: written whole or not at all, and handed out only if every bit is as it was written."""

from __future__ import annotations

import os
import pickle
import re
from functools import partial
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from mezzo.errors import MezzoError, StateError, UnsupportedError
from mezzo.files import opened, whole
from mezzo.session.state import archive
from mezzo.session.state.first_rank import by_first, refuse_parts, several

__all__ = ["load", "save"]


def save(state: Any, path: str | os.PathLike[str], *, each_rank: bool = False) -> None:
    """Write what ``torch.save`` writes, completely or not at all.

    The file is written beside its place, handed to the disk, and renamed: a process killed at any moment, or a full
    disk, leaves the old checkpoint as it was. :func:`load` reads it, and so does ``torch.load``. What a killed process
    left half written is removed by the next call for the same path. Several threads or processes may save to one
    path: the last one to finish stays.

    Of several ranks of ``torch.distributed`` the first writes. The others, where they call it too, wait until it has,
    and its failure is theirs. It never waits for them: ``if rank == 0: mezzo.save(…)`` is as good.

    Args:
        state: What ``torch.save`` takes: most often the state dicts of model, optimizer and session, side by side.
        path: The file, or a symbolic link to it. Its folder must exist; permissions and group of an old file are kept,
            also while it is written.
        each_rank: Whether each rank writes a file of its own, under a path of its own.

    Raises:
        DistributedError: The first rank has failed to save, or did not within the process group's timeout.
        StateError: What only one rank of several has: shards of tensors, or gradients of an unfinished window.
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
        >>> sorted(mezzo.load(path))
        ['amp', 'model', 'optimizer']
    """
    if each_rank or not several():
        _write(state, path)
    else:
        by_first(path, partial(_write, state, path), partial(refuse_parts, state))


def _write(state: Any, path: str | os.PathLike[str]) -> None:
    before = get_crc32_options()
    set_crc32_options(True)  # whatever this process asks of its other files: without them no damage is seen
    try:
        with whole(path) as file:
            torch.save(state, file)
    finally:
        set_crc32_options(before)


def load(path: str | os.PathLike[str], *, map_location: Any = None, weights_only: bool = True) -> Any:
    """Read what :func:`save` or ``torch.save`` wrote, if every record of it is as it was written.

    ``torch.load`` checks no checksums: a flipped bit inside a tensor is loaded as another number. Here each record of
    the file is compared with its CRC-32 before anything is unpickled, and both places that say where it lies with each
    other. Bits in padding, dates and the like change no value and go unremarked.

    Args:
        path: A regular file, in the format of ``torch.save`` since torch 1.6. Files of the one before, and tar files,
            carry no checksums and are refused: ``torch.load`` reads them.
        map_location: As in ``torch.load``.
        weights_only: As in ``torch.load``: only tensors and plain containers. ``False`` runs whatever program the file
            holds; a checksum says nothing about who wrote it.

    Returns:
        What was saved.

    Raises:
        StateError: A record is damaged, and which; the file is cut short or is no checkpoint; or it holds what
            ``weights_only`` refuses.
        UnsupportedError: Its tensors belong on a device that is not here.
        OSError: There is no such file, or it is something else, such as a folder or a pipe.

    **Cost**: one more reading of the file, from memory mostly: 0.4 s a gigabyte on one core, where ``torch.load`` takes
    0.7 s. Whoever writes into the very file between the two readings is not seen; :func:`save` never does.

    Example:
        >>> import mezzo, torch, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "last.pt")
        >>> mezzo.save({"weight": torch.tensor([1.0, 2.0])}, path)
        >>> mezzo.load(path)
        {'weight': tensor([1., 2.])}
    """
    name = os.fsdecode(path)
    with opened(path) as file:
        archive.check(file, name)
        file.seek(0)
        try:
            return torch.load(file, map_location=map_location, weights_only=weights_only, mmap=False)
        except pickle.UnpicklingError as error:
            raise (_refused if weights_only else _unreadable)(error, name) from error
        except (RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(error, name) from error


def _refused(error: Exception, path: str) -> MezzoError:
    found = re.search(r"(?:WeightsUnpickler error: |Trying to load )(.*)", str(error))
    return StateError(
        "the checkpoint holds more than tensors and plain containers",
        where=path,
        why=found[1].split(". Please use")[0] if found else str(error).partition("\n")[0],
        write=f"mezzo.load({path!r}, weights_only=False)   # runs what it holds: only if you trust who wrote it",
    )


def _unreadable(error: Exception, path: str) -> MezzoError:
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    if "device but torch." in text and "is_available() is False" in text:
        return UnsupportedError(
            "the checkpoint's tensors belong on a device that is not here",
            where=path,
            why=text.partition(". ")[0],
            write=f'mezzo.load({path!r}, map_location="cpu")',
        )
    return StateError(
        "the file is whole, and torch cannot read it", where=path, why=text, write="a file that mezzo.save wrote"
    )
