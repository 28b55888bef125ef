"""Checkpoints: written whole or not at all, and handed out only if every bit is as it was written."""

from __future__ import annotations

import os
from typing import Any, BinaryIO, Final
from zipfile import ZipFile

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from mezzo.errors import StateError
from mezzo.files import atomic_file, opened

#: An attribute of MS-DOS.
_FOLDER: Final = 0x10
#: Who speaks where torch refuses an archive in which ``zipfile`` finds no fault: its headers are read more strictly.
_READER: Final = "PytorchStreamReader"
_WRITE: Final = "mezzo.load(…) of an older checkpoint"


def save(path: str | os.PathLike[str], /, *, each_rank: bool = False, **parts: Any) -> None:
    """Write model, optimizer and session side by side, completely or not at all.

    The file is written beside its place, handed to the disk, and renamed: a process killed at any moment, or a full
    disk, leaves the old checkpoint as it was. :func:`load` reads it, and so does ``torch.load``. Of several ranks of
    ``torch.distributed`` the first writes.

    Args:
        path: The file, or a symbolic link to it. Its folder must exist; permissions and group of an old file are kept.
        each_rank: Whether each rank writes a file of its own, under a path of its own.
        **parts: By name what has a ``state_dict()``, whose result is written, or any other value.

    Raises:
        OSError: The folder does not exist or cannot be written, the disk is full, or the path is that of something
            else than a file, such as a device. Whatever is raised, the old checkpoint is as it was.

    **Cost**: room for two checkpoints while it writes, and one wait until the disk has the new one.

    Example:
        >>> import mezzo, torch, tempfile, os
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O1,emulate=true")
        >>> path = os.path.join(tempfile.mkdtemp(), "last.pt")
        >>> mezzo.save(path, model=model, optimizer=optimizer, amp=amp, epoch=3)
        >>> sorted(mezzo.load(path))
        ['amp', 'epoch', 'model', 'optimizer']
    """
    states = {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in parts.items()}
    dist = torch.distributed
    is_other_rank = dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
    if is_other_rank and not each_rank:
        return
    before = get_crc32_options()
    set_crc32_options(True)  # whatever this process asks of its other files: without them no damage is seen
    try:
        with atomic_file(path) as file:
            torch.save(states, file)
    finally:
        set_crc32_options(before)


def load(path: str | os.PathLike[str], *, map_location: Any = None, weights_only: bool = True, **parts: Any) -> Any:
    """Read what :func:`save` or ``torch.save`` wrote, if every record of it is as it was written.

    ``torch.load`` checks no checksums: a flipped bit inside a tensor is loaded as another number.

    Args:
        path: A regular file, in the format of ``torch.save`` since torch 1.6.
        map_location: As in ``torch.load``.
        weights_only: As in ``torch.load``: only tensors and plain containers. ``False`` runs whatever program the file
            holds; a checksum says nothing about who wrote it.
        **parts: What has a ``load_state_dict()``, which is given what was saved under its name.

    Returns:
        What was saved.

    Raises:
        StateError: A record is damaged, and which; or the file is cut short, or is no checkpoint.
        KeyError: It has none of a part; nothing was loaded.
        OSError: There is no such file, or it is something else, such as a folder or a pipe.
        Exception: What ``torch.load`` raises: of a device that is not here, of more than ``weights_only`` takes.

    **Cost**: one more reading of the file, from memory mostly.

    Example:
        >>> import mezzo, torch, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "last.pt")
        >>> mezzo.save(path, weight=torch.tensor([1.0, 2.0]))
        >>> mezzo.load(path)
        {'weight': tensor([1., 2.])}
    """
    with opened(path) as file:
        _check_records(file, os.fsdecode(path))
        file.seek(0)
        try:
            contents = torch.load(file, map_location=map_location, weights_only=weights_only, mmap=False)
        except RuntimeError as error:
            if not str(error).startswith(_READER):
                raise  # an error of the device, for instance, and not of the file
            raise _damaged(os.fsdecode(path), str(error).partition(". ")[0]) from None
    states = {name: contents[name] for name in parts}
    for name, part in parts.items():
        part.load_state_dict(states[name])
    return contents


def _check_records(file: BinaryIO, path: str) -> None:
    """Read all of an archive once, and raise unless every record has the checksum that it was written with."""
    try:
        with ZipFile(file) as archive:
            # If a flipped bit makes a record a folder, torch returns uninitialised memory for it.
            folders = (
                entry.filename for entry in archive.infolist() if entry.is_dir() or entry.external_attr & _FOLDER
            )
            damaged = archive.testzip() or next(folders, None)
    except Exception as error:  # zipfile raises a dozen kinds over headers that contradict each other
        raise _damaged(path, str(error) or "it ends before its header says") from None
    if damaged is not None:
        problem = f"the record {damaged!r} of the checkpoint is damaged"
        raise StateError(problem, where=path, why="its CRC-32 is another, or it is called a folder", write=_WRITE)


def _damaged(path: str, why: str) -> StateError:
    return StateError("the checkpoint is damaged, or none", where=path, why=why, write=_WRITE)
