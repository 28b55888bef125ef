"""Whether a file that ``torch.save`` wrote is whole: every record of the archive against its CRC-32.

``torch.load`` checks none of them. Python's ``zipfile`` does, and takes each record from where torch takes it, which
the list at the archive's end and the record's own header say together. It is more lenient than is good here, so that
what neither ``torch.save`` nor ``mezzo.save`` would write is refused beside it.

References:
    APPNOTE.TXT, the ZIP file format specification, 4.3 and 4.5.3; caffe2/serialize/inline_container.cc in PyTorch.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO, Final
from zipfile import BadZipFile, ZipFile, ZipInfo

from mezzo.errors import StateError

__all__ = ["check"]

_CHUNK: Final = 1 << 18
_HEAD, _END, _END_BYTES = b"PK\3\4", b"PK\5\6", 22
#: Sizes and checksum follow the data; names are UTF-8. Nothing else is said by a flag.
_FLAGS: Final = 1 << 3 | 1 << 11
_DIRECTORY: Final = 0x10  # an attribute of MS-DOS, for which torch would return memory as it finds it
#: What ``zipfile`` raises over headers that contradict each other, or lead out of the file.
_DAMAGES: Final = (BadZipFile, EOFError, OSError, OverflowError, RuntimeError, ValueError, struct.error)


def check(file: BinaryIO, path: str) -> None:
    """Read all of an archive once, and raise unless every record is as it was written.

    Args:
        file: The archive, open for reading.
        path: What to call it.

    Raises:
        StateError: Something is damaged, and which record that is; or the file is none that carries checksums.
    """
    what = "the checkpoint is damaged"
    try:
        if not _has_list(file):
            raise StateError(
                "nothing tells whether this checkpoint is whole",
                where=path,
                why="it is not the archive that torch.save writes since torch 1.6, whose records have checksums",
                write=f"torch.load({path!r}, weights_only=True), if you trust it, then mezzo.save(…)",
            )
        with ZipFile(file) as archive:
            entries, known = sorted(archive.infolist(), key=lambda entry: entry.header_offset), set[str]()
            if entries and entries[0].header_offset != 0:
                raise BadZipFile("something stands before its first record")
            for entry in entries:
                what = f"the record {entry.filename!r} of the checkpoint is damaged"
                _check_record(archive, entry, known)
                known.add(entry.filename)
    except StateError:
        raise
    except _DAMAGES as error:
        why = str(error) or "it ends before its header says"
        raise StateError(what, where=path, why=why, write="mezzo.load(…) of an older checkpoint") from None


def _has_list(file: BinaryIO) -> bool:
    """Whether a file ends with a list of records that have checksums, as far as its first and last bytes say."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise BadZipFile("the file is empty")
    file.seek(max(size - _END_BYTES, 0))
    ends = file.read(len(_END)) == _END
    file.seek(0)
    if not ends and file.read(len(_HEAD)) == _HEAD:
        raise BadZipFile("it does not end as an archive does: it was cut short, or something was written behind it")
    return ends


def _check_record(archive: ZipFile, entry: ZipInfo, known: set[str]) -> None:
    """Read one record, and raise what is wrong with it."""
    if entry.filename in known:
        raise BadZipFile("it stands twice in the list of records")
    if entry.flag_bits & ~_FLAGS or entry.compress_type or entry.compress_size != entry.file_size:
        raise BadZipFile("it is compressed, encrypted or in several parts, as torch.save never writes")
    if entry.external_attr & _DIRECTORY or entry.is_dir():
        raise BadZipFile("it is called a folder, and holds no data then")
    try:
        with archive.open(entry) as record:
            while record.read(_CHUNK):
                pass
    except BadZipFile as error:
        if "CRC-32" not in str(error):
            raise
        raise BadZipFile(f"the CRC-32 of its {entry.file_size:,} bytes is not {entry.CRC:08x}") from None
