"""Whether a file that ``torch.save`` wrote is whole: every record of the archive against its CRC-32.

``torch.load`` checks none of them. Where a record lies, how long it is and what it is called is written twice, in its
own header and in the list at the end, and only the two together leave no bit that could be wrong unseen; so both are
read here, strictly, and what neither ``torch.save`` nor ``mezzo.save`` would write is refused.

References:
    APPNOTE.TXT, the ZIP file format specification, 4.3 and 4.5.3; caffe2/serialize/inline_container.cc in PyTorch.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from mezzo.errors import StateError

__all__ = ["check"]

_CHUNK: Final = 1 << 18
_LOCAL: Final = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<4sHHHHIIH")
_LOCATOR: Final = struct.Struct("<4sIQI")
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
_DESCRIPTORS: Final = {size.size: size for size in (struct.Struct("<4sIII"), struct.Struct("<4sIQQ"))}
_SIGNATURES: Final = {
    _LOCAL: b"PK\3\4", _CENTRAL: b"PK\1\2", _END: b"PK\5\6", _LOCATOR: b"PK\6\7", _END64: b"PK\6\6",
    **dict.fromkeys(_DESCRIPTORS.values(), b"PK\7\x08"),
}  # fmt: skip
#: Sizes, checksum and the like follow the data; names are UTF-8. Nothing else is said by a flag.
_FOLLOWS: Final = 1 << 3
_FLAGS: Final = _FOLLOWS | 1 << 11
_DIRECTORY: Final = 0x10  # an attribute of MS-DOS, for which torch would return memory as it finds it
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF  # the number stands in the longer field of the extra data


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """One entry of the list at an archive's end."""

    name: bytes
    flags: int
    crc: int
    size: int
    offset: int  # of its own header


class _Damage(Exception):  # noqa: N818 - made into a StateError, with the path
    """What is wrong, in the words of the message, and in which record."""

    def __init__(self, why: str, record: bytes | None = None) -> None:
        super().__init__(why)
        self.record = record


def check(file: BinaryIO, path: str) -> None:
    """Read all of an archive once, and raise unless every record is as it was written.

    Args:
        file: The archive, open for reading.
        path: What to call it.

    Raises:
        StateError: Something is damaged, and which record that is; or the file is none that carries checksums.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        records, list_start = _listed(file, size)
        _check_records(file, records, list_start)
    except _Damage as damage:
        if damage.record is None:
            what = "the checkpoint is damaged"
        else:
            what = f"the record {damage.record.decode(errors='backslashreplace')!r} of the checkpoint is damaged"
        raise StateError(what, where=path, why=str(damage), write="mezzo.load(…) of an older checkpoint") from None
    except _Unchecked as unchecked:
        raise StateError(
            "nothing tells whether this checkpoint is whole",
            where=path,
            why=str(unchecked),
            write=f"torch.load({path!r}, weights_only=True), if you trust it, then mezzo.save(…)",
        ) from None


class _Unchecked(Exception):  # noqa: N818 - made into a StateError, with the path
    """A file without checksums."""


def _read(file: BinaryIO, offset: int, form: struct.Struct, what: str, record: bytes | None = None) -> tuple[int, ...]:
    """Read a header and require its signature."""
    file.seek(offset)
    data = file.read(form.size)
    if len(data) < form.size or not data.startswith(_SIGNATURES[form]):
        raise _Damage(f"{what} is not where it must be, at byte {offset:,}", record)
    return form.unpack(data)[1:]


# The list at the end ------------------------------------------------------------------------------------------


def _listed(file: BinaryIO, size: int) -> tuple[list[_Record], int]:
    """Return the records in the order in which they lie, and where the list begins."""
    start, count, length = _end(file, size)
    file.seek(start)
    data = file.read(length)
    records, at = [], 0
    for number in range(count):
        if not data.startswith(_SIGNATURES[_CENTRAL], at) or at + _CENTRAL.size > length:
            raise _Damage(f"entry {number} of the list of records is not where it must be, at byte {start + at:,}")
        record, at = _entry(data, at)
        records.append(record)
    if at != length:
        raise _Damage(f"the list of records has {length:,} bytes, and its entries have {at:,}")
    if len(names := {record.name for record in records}) != len(records):
        twice = next(name for name in names if sum(record.name == name for record in records) > 1)
        raise _Damage("it stands twice in the list of records", twice)
    return sorted(records, key=lambda record: record.offset), start


def _end(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """Return where the list of records begins, how many it has, and its length."""
    if size == 0:
        raise _Damage("the file is empty")
    file.seek(0)
    head = file.read(4)
    file.seek(max(size - _END.size, 0))
    if not file.read(4).startswith(_SIGNATURES[_END]):
        if head != _SIGNATURES[_LOCAL]:
            raise _Unchecked(
                "it is not the archive that torch.save writes since torch 1.6, whose records have checksums"
            )
        raise _Damage("it does not end as an archive does: it was cut short, or something was written behind it")
    at = size - _END.size
    disk, list_disk, here, count, length, start, comment = _read(file, at, _END, "the archive's end")
    if (disk, list_disk, comment) != (0, 0, 0) or here != count:
        raise _Damage("the archive's end contradicts itself")
    file.seek(max(at - _LOCATOR.size, 0))
    if at >= _LOCATOR.size and file.read(4) == _SIGNATURES[_LOCATOR]:
        at -= _LOCATOR.size
        disk, place, disks = _read(file, at, _LOCATOR, "the place of the long end")
        at -= _END64.size
        rest, _, _, *numbers = _read(file, at, _END64, "the archive's long end")
        disk64, list_disk, here, count64, length64, start64 = numbers
        if (disk, disks, disk64, list_disk, rest, place, here) != (0, 1, 0, 0, _END64.size - 12, at, count64):
            raise _Damage("the archive's long end contradicts itself")
        pairs = ((count, count64, _FULL16), (length, length64, _FULL32), (start, start64, _FULL32))
        if any(short not in (full, long) for short, long, full in pairs):
            raise _Damage("the archive's two ends contradict each other")
        count, length, start = count64, length64, start64
    if start + length != at:
        raise _Damage(f"the list of records ends at byte {start + length:,}, and the archive's end begins at {at:,}")
    return start, count, length


def _entry(data: bytes, at: int) -> tuple[_Record, int]:
    """Read one entry of the list, and return where the next one begins."""
    fields = _CENTRAL.unpack_from(data, at)
    flags, method, crc, packed, size, name_length, extra_length, comment_length = *fields[3:5], *fields[7:13]
    disk, attributes, offset = fields[13], fields[15], fields[16]
    at += _CENTRAL.size
    name, extra = data[at : at + name_length], data[at + name_length : at + name_length + extra_length]
    size, packed, offset = _long(extra, [size, packed, offset], name)
    if flags & ~_FLAGS or method != 0 or packed != size or disk != 0:
        raise _Damage("it is compressed, encrypted or in several parts, as torch.save never writes", name)
    if attributes & _DIRECTORY or name.endswith(b"/"):
        raise _Damage("it is called a folder, and holds no data then", name)
    return (
        _Record(name=name, flags=flags, crc=crc, size=size, offset=offset),
        at + name_length + extra_length + comment_length,
    )


def _long(extra: bytes, numbers: list[int], name: bytes) -> list[int]:
    """Replace each number that is too large for its field by the long one of the extra field."""
    at, longs = 0, b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            longs = extra[at + 4 : at + 4 + length]
        at += 4 + length
    if len(longs) < 8 * numbers.count(_FULL32):
        raise _Damage("a number of its header stands nowhere", name)
    long = iter(struct.unpack(f"<{len(longs) // 8}Q", longs[: len(longs) // 8 * 8]))
    return [next(long) if number == _FULL32 else number for number in numbers]


# The records themselves ---------------------------------------------------------------------------------------


def _check_records(file: BinaryIO, records: list[_Record], list_start: int) -> None:
    """Check each record: its header against the list, its data against its checksum, and that no byte is left over."""
    ends = [*(record.offset for record in records[1:]), list_start]
    if records and records[0].offset != 0:
        raise _Damage("something stands before it", records[0].name)
    buffer = memoryview(bytearray(_CHUNK))
    for record, end in zip(records, ends, strict=True):
        _, flags, method, _, _, crc, packed, size, name_length, extra_length = _read(
            file, record.offset, _LOCAL, "its header", record.name
        )
        name = file.read(name_length)
        if name != record.name:
            raise _Damage(f"its header calls it {name.decode(errors='backslashreplace')!r}", record.name)
        if (flags, method) != (record.flags, 0):
            raise _Damage("its header and the list of records contradict each other", record.name)
        begin = record.offset + _LOCAL.size + name_length + extra_length
        follows = end - begin - record.size
        if flags & _FOLLOWS:
            form = _DESCRIPTORS.get(follows)
            if form is None:
                raise _Damage(f"{follows:,} bytes lie between its data and what comes next", record.name)
            said = _read(file, begin + record.size, form, "what follows its data", record.name)
            allowed: tuple[int, ...] = (0, _FULL32)
        else:
            if follows != 0:
                raise _Damage(f"{follows:,} bytes lie between its data and what comes next", record.name)
            said, allowed = (record.crc, record.size, record.size), (_FULL32,)
        wrong = [n for n, known in ((packed, record.size), (size, record.size)) if n not in (known, *allowed)]
        if said != (record.crc, record.size, record.size) or wrong or crc not in (record.crc, *allowed[:1]):
            raise _Damage("its header and the list of records contradict each other", record.name)
        file.seek(begin)
        if (found := _crc(file, record.size, buffer)) != record.crc:
            raise _Damage(f"the CRC-32 of its {record.size:,} bytes is {found:08x}, not {record.crc:08x}", record.name)


def _crc(file: BinaryIO, size: int, buffer: memoryview) -> int:
    found = 0
    for count in _portions(size):
        read = file.readinto(buffer[:count])  # type: ignore[attr-defined]
        found = zlib.crc32(buffer[:read], found)
    return found


def _portions(size: int) -> Iterator[int]:
    while size > 0:
        yield min(size, _CHUNK)
        size -= _CHUNK
