"""Many files in one: a zip of stored entries, aligned so that they can be mapped and read where they lie.

One file is one fsync: a segment of thirteen small files took ten times as long."""

import mmap
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

from storage.disk.atomic_files import Content

ALIGNMENT = 8
"""Alignment of an entry's first byte; numpy and torch want it for numbers of 8 bytes."""
_HEADER_BYTES = 30
_PADDING_ID = 0xD935
"""Id of the extra field that fills a header up, as Android's zipalign uses it."""
_SMALL_BYTES = 1 << 20
"""Up to here joining the parts costs less than writing each."""
LARGE_BYTES = 1 << 31
"""Above this size an entry needs the longer header of ZIP64."""
_LARGE_HEADER_BYTES = 20


class _Parts(list[bytes | memoryview]):
    def write(self, part: bytes | memoryview) -> int:
        self.append(part)
        return len(part)

    def flush(self) -> None:
        """Do nothing: the parts are in memory."""


def zipped(contents: Mapping[str, Content]) -> Content:
    """Return a zip file of these, in parts: their bytes are not copied."""
    parts = _Parts()
    at = 0
    with zipfile.ZipFile(parts, "w") as archive:  # type: ignore[call-overload]  # write and flush suffice
        for name, content in contents.items():
            views = [memoryview(part).cast("B") for part in content if len(part)]
            size_bytes = sum(map(len, views))
            if size_bytes <= _SMALL_BYTES:
                views = [memoryview(b"".join(views))]
            large = size_bytes > LARGE_BYTES
            entry = zipfile.ZipInfo(name)
            before = at + _HEADER_BYTES + len(name.encode()) + 4 + large * _LARGE_HEADER_BYTES
            padding = -before % ALIGNMENT
            entry.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
            already = len(parts)
            with archive.open(entry, "w", force_zip64=large) as file:
                for view in views:
                    file.write(view)
            at += sum(map(len, parts[already:]))
    return parts


def map_entries(path: Path) -> dict[str, memoryview]:
    """Return the bytes of each entry of the zip file at `path`, which stays mapped while one of them is held.
    Raises `zipfile.BadZipFile` when it is not whole, or not one of ours."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        whole = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        return {entry.filename: _bytes_of(entry, whole) for entry in archive.infolist()}


def _bytes_of(entry: zipfile.ZipInfo, whole: memoryview) -> memoryview:
    try:
        lengths = struct.unpack_from("<HH", whole, entry.header_offset + _HEADER_BYTES - 4)
    except struct.error as error:
        raise zipfile.BadZipFile(f"{entry.filename} begins beyond its end") from error
    begin = entry.header_offset + _HEADER_BYTES + sum(lengths)
    within = entry.header_offset >= 0 and begin + entry.file_size <= len(whole)
    if entry.compress_type != zipfile.ZIP_STORED or not within:
        raise zipfile.BadZipFile(f"{entry.filename} does not lie in it as it is")
    return whole[begin : begin + entry.file_size]
