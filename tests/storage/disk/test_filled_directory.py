"""A directory that is filled again is there whole, the old one or the new one."""

import pytest

from bus.errors import StorageError
from storage.disk import atomic_files
from storage.disk.atomic_files import filling


def names(directory):
    return [path.name for path in directory.iterdir()]


def fill(target, name):
    with filling(target, replaces=True) as directory:
        (directory / name).touch()


def test_a_directory_is_replaced_by_another(tmp_path):
    for name in ("old", "new"):
        fill(tmp_path / "made", name)
        assert names(tmp_path / "made") == [name]
    assert names(tmp_path) == ["made"]


def test_a_disk_that_refuses_the_last_bytes_leaves_the_directory_before(tmp_path, monkeypatch):
    target = tmp_path / "made"
    fill(target, "old")

    def refuse(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files, "fsync_tree", refuse)
    with pytest.raises(StorageError):
        fill(target, "new")
    assert names(target) == ["old"]
    assert names(tmp_path) == ["made"]
