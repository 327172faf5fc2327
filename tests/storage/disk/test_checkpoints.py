import pytest

from bus.errors import StorageError
from storage.disk import checkpoints
from storage.disk.atomic_files import write_file


def save(root, step):
    temporary = checkpoints.temporary(root, step)
    (temporary / "rank_0").mkdir()
    (temporary / "rank_0" / "weights").write_text(f"step {step}")
    checkpoints.publish(temporary, checkpoints.directory(root, step))


def test_published_checkpoints_are_listed_in_order_with_the_latest(tmp_path):
    for step in (12, 3, 100_000_000):
        save(tmp_path, step)
    assert checkpoints.steps(tmp_path) == [3, 12, 100_000_000]
    assert checkpoints.latest(tmp_path) == tmp_path / "step_100000000"
    assert (tmp_path / "step_00000012" / "rank_0" / "weights").read_text() == "step 12"


def test_those_of_the_supervised_stage_come_before_the_others_and_are_pruned_first(tmp_path):
    for step in (0, checkpoints.supervised(20), checkpoints.supervised(100), 3):
        save(tmp_path, step)
    assert checkpoints.steps(tmp_path) == [0, 3]
    assert [path.name for path in sorted(tmp_path.glob("warmup_*"))] == ["warmup_00000020", "warmup_00000100"]
    found = checkpoints.every_step(tmp_path)
    assert [*map(checkpoints.supervised, found[:2]), *found[2:]] == [20, 100, 0, 3]
    checkpoints.prune(tmp_path, keep=3)
    assert checkpoints.every_step(tmp_path) == found[1:]
    checkpoints.prune(tmp_path, keep=1)
    assert checkpoints.latest(tmp_path) == tmp_path / "step_00000003"


def test_a_missing_root_holds_no_checkpoint(tmp_path):
    assert checkpoints.steps(tmp_path / "none") == []
    assert checkpoints.latest(tmp_path / "none") is None


def test_unfinished_and_foreign_directories_are_no_checkpoints(tmp_path):
    save(tmp_path, 1)
    temporary = checkpoints.temporary(tmp_path, 2)
    assert checkpoints.temporary(tmp_path, 2) == temporary  # another rank asks
    (temporary / "half").write_text("of it")
    (tmp_path / "step_final").mkdir()
    (tmp_path / "step_00000009").write_text("a file")
    assert checkpoints.steps(tmp_path) == [1]


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    (checkpoints.temporary(tmp_path, 2) / "half").write_text("of it")
    checkpoints.recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    checkpoints.recover(tmp_path / "none")


def test_pruning_keeps_the_latest(tmp_path):
    for step in range(5):
        save(tmp_path, step)
    assert len(checkpoints.prune(tmp_path, keep=2)) == 3
    assert checkpoints.steps(tmp_path) == [3, 4]
    assert checkpoints.prune(tmp_path, keep=2) == []
    save(tmp_path, 5)
    assert len(checkpoints.prune(tmp_path, keep=1, besides={3})) == 1
    assert checkpoints.steps(tmp_path) == [3, 5]
    with pytest.raises(ValueError, match="keep at least 1"):
        checkpoints.prune(tmp_path, keep=0)


def test_a_crash_while_pruning_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2)

    def killed(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("storage.disk.checkpoints.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.discard(checkpoints.prune(tmp_path, keep=1))
    assert checkpoints.steps(tmp_path) == [2]
    checkpoints.recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_publishing_over_a_checkpoint_is_refused(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(StorageError, match="step_00000001 exists already"):
        save(tmp_path, 1)
    assert (tmp_path / "step_00000001" / "rank_0" / "weights").read_text() == "step 1"


def test_a_disk_that_refuses_publishes_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("storage.disk.atomic_files.os.fsync", full)
        temporary = tmp_path / "prepared"
        temporary.mkdir()
        with pytest.raises(StorageError, match=r"cannot write .*step_00000001: the disk is full"):
            checkpoints.publish(temporary, checkpoints.directory(tmp_path, 1))
    assert checkpoints.steps(tmp_path) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_file(path, b"old")

    def killed(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("storage.disk.atomic_files.os.fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            write_file(path, b"new")
    assert path.read_bytes() == b"old"
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
