"""Segments outside the store: a zip file with a compressed zarr group each, in a directory or behind a URL.

`zarr.open` reads each as it lies there (docs/architecture.md)."""

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import structlog
from fsspec.implementations.local import LocalFileSystem

from bus.errors import ConfigError, StorageError
from bus.process.work_progress import tracked
from storage.disk.atomic_files import fsync_path, lock_directory, publish
from storage.store.layout import SegmentEntry, find_entries
from storage.store.retired import load_retired
from storage.store.segments import FILE, check_trajectories, compressed_file

log = structlog.get_logger()
SUFFIX = ".zip"
BUCKETS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"))
"""File systems without folders: to make one there would make a bucket, of a name that is only mistyped."""


def check_archive(archive: str) -> None:
    """Write a file there and remove it: what is wrong is to be known before the first segment must go.

    Raises `ConfigError` for a driver, credentials or a bucket that are missing, and for a directory that
    refuses. One that does not answer is warned of only: it may be back by then, and is tried again."""
    try:
        with _translating(archive):
            files, root = fsspec.core.url_to_fs(archive)
            _make_folder(files, root)
            probe = f"{root}/.probe-{secrets.token_hex(4)}"
            files.pipe_file(probe, b"")
            files.rm_file(probe)
    except StorageError as error:
        if _may_pass(error.__cause__):
            log.warning("archive_does_not_answer", archive=archive, reason=str(error))
            return
        raise ConfigError(
            f"replay.archive: {error}; name a directory, or the URL of a bucket that is there (s3://bucket/"
            "replay needs s3fs, the extra `s3`, and credentials in the AWS environment)"
        ) from error


def _may_pass(error: BaseException | None) -> bool:
    """Return whether trying again may help. Known by name: each driver has errors of its own, of no common
    base."""
    names = [kind.__name__ for kind in type(error).__mro__]
    return any(word in name for name in names for word in ("Connect", "Timeout"))


def archive_segment(segment: Path, archive: str) -> None:
    """Put a segment into the archive as `<name of its store>/<name>.zip`, replacing what is there.

    `archive` is a directory or a URL such as s3://bucket/run; the credentials are those of fsspec's driver
    (s3fs: the AWS environment). On return the file is there complete; raises `StorageError` otherwise."""
    name = f"{segment.parent.name}/{segment.name}{SUFFIX}"
    parts = compressed_file(segment)
    with _translating(f"{archive}/{name}"):
        files, root = fsspec.core.url_to_fs(archive)
        final, unfinished = f"{root}/{name}", f"{root}/{name}.part"
        _make_folder(files, f"{root}/{segment.parent.name}")
        with files.open(unfinished, "wb") as file:
            for part in parts:
                file.write(part)
        _put_in_place(files, unfinished, final)


def _make_folder(files: fsspec.AbstractFileSystem, folder: str) -> None:
    protocols = {files.protocol} if isinstance(files.protocol, str) else {*files.protocol}
    if not protocols & BUCKETS:
        files.makedirs(folder, exist_ok=True)


def _put_in_place(files: fsspec.AbstractFileSystem, unfinished: str, final: str) -> None:
    if not isinstance(files, LocalFileSystem):
        files.mv(unfinished, final)
        return
    fsync_path(unfinished)
    Path(unfinished).replace(final)
    for folder in (Path(final).parent, Path(final).parents[1]):
        fsync_path(folder)


def restore(directory: Path, archive: str) -> list[str]:
    """Bring every retired segment of the store in `directory` back, bit for bit; return their names. To call
    while no writer has it open. Raises `StorageError` naming what the archive does not hold whole."""
    with lock_directory(directory):
        entries, _ = find_entries(directory)
        retired = [entry for entry in entries if entry.retired]
        what = f"bringing back the segments of {directory}"
        return [name for entry in tracked(retired, what) for name in _restore_all(directory, entry, archive)]


def _restore_all(directory: Path, retired: SegmentEntry, archive: str) -> list[str]:
    """Bring back the segments of a retired entry; it covers them until the last one is here."""
    path = directory / retired.name
    _, pieces = load_retired(path, retired.first, retired.last)
    names = [_restore(directory, SegmentEntry(piece.first, piece.last), archive) for piece in pieces]
    path.unlink()
    fsync_path(directory)
    return names


def _restore(directory: Path, entry: SegmentEntry, archive: str) -> str:
    segment = directory / entry.name
    name = f"{directory.name}/{segment.name}{SUFFIX}"
    with (
        _translating(f"{archive}/{name}"),
        tempfile.TemporaryDirectory(dir=directory, prefix=".tmp-") as made,
    ):
        files, root = fsspec.core.url_to_fs(archive)
        restored = Path(made) / segment.name
        restored.mkdir()
        files.get_file(f"{root}/{name}", str(restored / FILE))
        check_trajectories(restored)
        fsync_path(restored / FILE)
        if segment.exists():  # a crash came before its entry was unlinked
            shutil.rmtree(segment)
        publish(restored, segment)
    return segment.name


@contextmanager
def _translating(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each of fsspec's drivers has errors of its own
        raise StorageError(f"{what} cannot be written or read: {error or type(error).__name__}") from error
