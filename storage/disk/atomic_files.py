"""Writes files and directories so that after any crash they exist complete or not at all."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import BufferedRandom
from pathlib import Path
from typing import IO, Any

from bus.codec import Json
from bus.errors import LostDataError, StorageError
from storage.disk.file_errors import naming, writing

PARTS_A_WRITE = 1024
"""Buffers that Linux accepts in one writev (IOV_MAX)."""
BYTES_A_WRITE = 32 << 20
"""Bytes from which pieces are written before more of them are read."""
TEMPORARY_PREFIX = ".tmp-"
"""Prefix of the name of everything unfinished."""


def temporary_sibling(path: Path) -> Path:
    """Return where `path` is prepared: beside it, since a rename is atomic only within one file system."""
    return path.with_name(TEMPORARY_PREFIX + path.name)


def fsync_path(path: Path | str) -> None:
    """Wait until the disk holds this file's bytes, or this directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path | str) -> None:
    """Wait until the disk holds everything below `directory`, and its own entries."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                fsync_tree(entry.path)
            elif entry.is_file(follow_symlinks=False):
                fsync_path(entry.path)
    fsync_path(directory)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished directory its final name, durably. Raises `StorageError` when `final` exists already or
    the disk refuses; then `final` is as it was."""
    with writing(final):
        fsync_tree(temporary)  # before the rename: a power cut must not leave the final name on lost bytes
        _rename(temporary, final)


@contextmanager
def filling(target: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Give a directory to fill, which becomes `target` at the end, or nothing is left of it.

    Raises `StorageError` when the disk refuses, and when `target` exists; a directory goes with `replaces`,
    once all of the new one is on the disk."""
    temporary = temporary_sibling(target)
    make_directory(target.absolute().parent)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with writing(target), naming(target):
            temporary.mkdir()
            yield temporary
            old = temporary_sibling(temporary)
            if replaces and target.is_dir():
                fsync_tree(temporary)  # a disk that refuses now leaves `target` as it was
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            publish(temporary, target)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


Data = bytes | memoryview
"""Bytes in one piece."""
Content = Iterable[Data]
"""Content of a file: these pieces, one after the other."""


def publish_files(final: Path, contents: Mapping[str, Content]) -> None:
    """Make a directory of these files, named `file` or `folder/file`, durably and whole. Opens each file only
    once, which matters where this happens many times a second. Raises like `publish`."""
    temporary = temporary_sibling(final)
    folders = {name.rpartition("/")[0] for name in contents} - {""}
    with writing(final):
        try:
            temporary.mkdir()
            for folder in folders:
                (temporary / folder).mkdir()
            _write_files(temporary, contents)
            for folder in folders:  # a file's own fsync does not make its name in the folder durable
                fsync_path(f"{temporary}/{folder}")
            fsync_path(temporary)
            _rename(temporary, final)
        except (OSError, StorageError):
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _write_files(directory: Path, contents: Mapping[str, Content]) -> None:
    """Write all files before the first fsync, so that one commit of the journal takes all of them."""
    with ExitStack() as opened:
        files = []
        for name, content in contents.items():
            file = opened.enter_context(open(f"{directory}/{name}", "xb", buffering=0))  # noqa: PTH123  # hot
            write_parts(file.fileno(), content)
            files.append(file)
        for file in files:
            os.fsync(file)


def read_json(path: Path, remedy: str) -> Any:
    """Read a JSON file. Raises `LostDataError`, which names the file and `remedy`, when it is garbled."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise LostDataError(f"{path} is not JSON ({error}): {remedy}") from error


def write_parts(descriptor: int, content: Content) -> None:
    """Write the pieces without joining them, which would copy every byte once more. Raises `OSError`."""
    parts, size_bytes = [], 0
    for part in content:
        parts.append(memoryview(part).cast("B"))
        size_bytes += len(parts[-1])
        if size_bytes >= BYTES_A_WRITE or len(parts) == PARTS_A_WRITE:
            _write_all(descriptor, parts)
            parts, size_bytes = [], 0
    _write_all(descriptor, parts)


def _write_all(descriptor: int, parts: list[memoryview]) -> None:
    parts = [part for part in parts if len(part)]
    while parts:
        written = os.writev(descriptor, parts[:PARTS_A_WRITE])  # may write less: 2 GiB at most
        whole = 0
        while whole < len(parts) and written >= len(parts[whole]):
            written -= len(parts[whole])
            whole += 1
        del parts[:whole]
        if written:
            parts[0] = parts[0][written:]


def _rename(temporary: Path, final: Path) -> None:
    if final.exists():
        raise StorageError(f"{final} exists already: two processes write here, or it was not cleared")
    temporary.rename(final)
    fsync_path(final.parent)  # the new name is durable only when the directory is


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents, durably."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for created in missing:  # each new entry lies in its parent
        fsync_path(created.parent)


def try_lock(file: IO[Any]) -> bool:
    """Lock `file` against other processes, or return False; it is free when all who hold it open ended."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(path: Path) -> BufferedRandom | None:
    """Hold the lock `path` until the file is closed, or this process dies; None if another process has it.
    Raises `StorageError` when there can be no such file."""
    with writing(path):
        file = path.open("a+b")
    if try_lock(file):
        return file
    file.close()
    return None


def lock_directory(directory: Path) -> BufferedRandom:
    """Become the only writer of `directory` until the file is closed, or this process dies."""
    file = lock_file(directory / ".lock")
    if file is None:
        raise StorageError(f"{directory} is being written by another process: stop that one first")
    return file


@contextmanager
def one_at_a_time(path: Path, timeout_s: float = 300.0) -> Iterator[None]:
    """Wait while another process is inside for the same `path`, which need not exist yet. Raises
    `StorageError` after `timeout_s`."""
    make_directory(path.parent)
    deadline = time.monotonic() + timeout_s
    with (path.parent / f".{path.name}.lock").open("a") as file:
        while not try_lock(file):
            if time.monotonic() > deadline:
                raise StorageError(f"another process has kept {path} for {timeout_s:g} s")
            time.sleep(0.05)
        yield


def write_file(path: Path, data: bytes) -> None:
    """Replace the file atomically and durably: a reader sees the old content or the new one."""
    temporary = temporary_sibling(path)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_path(path.parent)  # the new name is durable only when the directory is


def write_json(path: Path, value: Json) -> None:
    """Replace the file atomically and durably by `value` as indented JSON."""
    write_file(path, (json.dumps(value, indent=2) + "\n").encode())


def append_lines(path: Path, values: Iterable[object]) -> None:
    """Add a line of JSON for each value, below whatever a kill left unfinished. From then on a kill of this
    process does not lose them."""
    lines = "".join(json.dumps(value, separators=(",", ":")) + "\n" for value in values)
    with naming(path), path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                lines = "\n" + lines
        file.write(lines.encode())


def remove(directory: Path) -> None:
    """Remove a directory, or a file, so that a crash leaves a left-over to remove, never half of it."""
    condemned = temporary_sibling(directory)
    directory.rename(condemned)
    if condemned.is_dir():
        shutil.rmtree(condemned)
    else:
        condemned.unlink()


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed writer left unfinished in `directory`, which need not exist."""
    for path in directory.glob(TEMPORARY_PREFIX + "*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
