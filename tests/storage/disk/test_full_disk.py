"""What libraries raise that cannot write is told as a full disk, or a limit, with the place."""

import resource
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from bus.errors import DiskFullError, StorageError
from storage.disk import file_errors
from storage.disk.file_errors import file_error, naming, unwritable

TENSORS = {"weight": torch.zeros(100_000)}


def to_path(path):
    torch.save(TENSORS, path)


def to_file(path):
    with path.open("wb") as file:
        torch.save(TENSORS, file)


def by_safetensors(path):
    save_file(TENSORS, path)


WRITERS = {"torch, a path": to_path, "torch, a file": to_file, "safetensors": by_safetensors}


@pytest.fixture
def small_files():
    """No file may grow beyond 20 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", [to_file, by_safetensors])
def test_what_a_library_raises_names_the_limit_and_the_place(tmp_path, small_files, write):
    with pytest.raises(OSError, match="too large") as raised, naming(tmp_path / "file"):
        write(tmp_path / "file")
    told = f"{tmp_path}/file may not grow further: raise the limit of files' sizes"
    assert told in str(file_error(raised.value))
    assert type(unwritable(tmp_path, raised.value)) is StorageError


def test_a_disk_that_is_full_is_named_where_a_file_reaches_it(tmp_path):
    (tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised, naming(tmp_path / "file"):
        to_file(tmp_path / "file")
    told = unwritable(tmp_path, raised.value)
    assert isinstance(told, DiskFullError)
    assert str(told) == (
        f"cannot write {tmp_path}: the disk is full, and {tmp_path}/file could not be written: "
        "free some, and start again"
    )


def test_a_small_file_that_torch_cannot_write_is_told_as_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(file_errors, "LEAST_FREE_BYTES", 1 << 62)  # torch says no more than that it cannot
    (tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), naming(tmp_path / "file"):
        torch.save({"weight": torch.zeros(1)}, tmp_path / "file")


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="mine"), naming(tmp_path):
        raise RuntimeError("mine")
    with pytest.raises(RuntimeError, match="inline_container"), naming(tmp_path):
        raise RuntimeError("enforce fail at inline_container.cc:672")  # on a disk with room


def write_all(directory):
    """Print what is told of each writer, on a disk of 256 kB."""
    from pathlib import Path

    for name, write in WRITERS.items():
        file = Path(directory) / "file"
        try:
            with naming(file):
                write(file)
        except OSError as error:
            print(f"{name}: {file_error(error)}")  # noqa: T201 - who asked reads it
        file.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_real_disk_that_is_full_is_named_whichever_library_writes(tmp_path):
    code = f"from tests.storage.disk.test_full_disk import write_all; write_all({str(tmp_path)!r})"
    mount = f"mount -t tmpfs -o size=256k none {tmp_path}"
    tried = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount], capture_output=True, timeout=60, check=False
    )
    if tried.returncode:
        pytest.skip(f"this host gives no disk of one's own: {tried.stderr!r}")
    within = f'{mount} && exec "$0" -c "$1"'
    command = ["unshare", "-rm", "sh", "-c", within, sys.executable, code]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    full = f"the disk is full, and {tmp_path}/file could not be written: free some, and start again"
    assert told.splitlines() == [f"{name}: {full}" for name in WRITERS]
