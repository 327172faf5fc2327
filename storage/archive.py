"""Segments outside the store: one zstd-compressed tar file each, in a directory or behind any fsspec URL."""

import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import zstandard
from fsspec.implementations.local import LocalFileSystem

from bus.errors import StorageError
from storage.files import fsync_path, lock_directory, publish
from storage.pieces import Piece, find_pieces

LEVEL = 3
SUFFIX = ".tar.zst"


def archive_segment(segment: Path, archive: str) -> None:
    """Put a segment into the archive as `<name of its store>/<name>.tar.zst`, replacing what is there.

    `archive` is a directory or a URL such as s3://bucket/run; the credentials are those of fsspec's driver
    (s3fs: the AWS environment). On return the file is there whole; raises `StorageError` otherwise."""
    name = f"{segment.parent.name}/{segment.name}{SUFFIX}"
    with _translating(f"{archive}/{name}"):
        files, root = fsspec.core.url_to_fs(archive)
        final, unfinished = f"{root}/{name}", f"{root}/{name}.part"
        files.makedirs(f"{root}/{segment.parent.name}", exist_ok=True)
        with (
            files.open(unfinished, "wb") as file,
            zstandard.ZstdCompressor(LEVEL, write_checksum=True).stream_writer(file, closefd=False) as packed,
            tarfile.open(fileobj=packed, mode="w|") as tar,
        ):
            tar.add(segment, arcname=segment.name)
        _put_in_place(files, unfinished, final)


def _put_in_place(files: fsspec.AbstractFileSystem, unfinished: str, final: str) -> None:
    if not isinstance(files, LocalFileSystem):
        files.mv(unfinished, final)
        return
    fsync_path(unfinished)
    Path(unfinished).replace(final)
    for folder in (Path(final).parent, Path(final).parents[1]):
        fsync_path(folder)


def restore(directory: Path, archive: str) -> list[str]:
    """Bring every retired segment of the store in `directory` back, bit for bit; their names.

    To call while no writer has it open. Raises `StorageError` naming what the archive does not hold whole."""
    with lock_directory(directory):
        pieces, _ = find_pieces(directory)
        retired = [piece for piece in pieces if piece.retired]
        return [_restore(directory, piece, archive) for piece in retired]


def _restore(directory: Path, retired: Piece, archive: str) -> str:
    segment = directory / Piece(retired.first, retired.last).name
    name = f"{directory.name}/{segment.name}{SUFFIX}"
    with (
        _translating(f"{archive}/{name}"),
        tempfile.TemporaryDirectory(dir=directory, prefix=".tmp-") as made,
    ):
        files, root = fsspec.core.url_to_fs(archive)
        with (
            files.open(f"{root}/{name}", "rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as unpacked,
            tarfile.open(fileobj=unpacked, mode="r|") as tar,
        ):
            tar.extractall(made, filter="data")
        if segment.exists():  # a crash came between the two lines below
            shutil.rmtree(segment)
        publish(Path(made) / segment.name, segment)
        (directory / retired.name).unlink()
        fsync_path(directory)
    return segment.name


@contextmanager
def _translating(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, tarfile.TarError, zstandard.ZstdError, ImportError, ValueError) as error:
        raise StorageError(f"{what} cannot be written or read: {error}") from error
