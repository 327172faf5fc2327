"""A full disk in words."""

import shutil
from pathlib import Path

import pytest

from storage.disk import file_errors
from storage.disk.file_errors import LEAST_FREE_BYTES, lack_of_room


def with_free(monkeypatch: pytest.MonkeyPatch, directory: Path, free: int) -> None:
    usage = shutil.disk_usage(directory)._replace(total=1 << 30, free=free)
    monkeypatch.setattr(file_errors.shutil, "disk_usage", lambda _: usage)


def test_full_disk_is_said_with_its_name_what_is_free_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with_free(monkeypatch, tmp_path, 3 << 20)
    assert lack_of_room(tmp_path) == (
        f"the disk of {tmp_path} is full: 3 of 1024 MiB are free, and nothing more is stored: free some"
    )


def test_disk_with_room_and_one_of_another_host_are_no_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert lack_of_room(tmp_path / "elsewhere") == ""
    with_free(monkeypatch, tmp_path, LEAST_FREE_BYTES)
    assert lack_of_room(tmp_path) == ""
