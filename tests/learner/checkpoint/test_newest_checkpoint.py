import json
import shutil

import pytest
from structlog.testing import capture_logs

from bus.errors import ConfigError, LostDataError, StorageError
from learner.checkpoint import newest_checkpoint
from learner.checkpoint.commit import read_extra, save_checkpoint, start_checkpoint
from learner.checkpoint.newest_checkpoint import newest_whole
from learner.progress.progress import checkpoint_step
from storage.disk import checkpoints
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.checkpoint.saved_trainers import train, trainer_of
from tests.learner.tiny import tiny_model


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Checkpoints of steps 1 to 3, which nobody changes."""
    root = tmp_path_factory.mktemp("three")
    trainer = trainer_of(tiny_model())
    for step in (1, 2, 3):
        save_checkpoint(trainer, root, step, {"step": step}, keep=3)
    return root


@pytest.fixture
def root(three, tmp_path):
    return shutil.copytree(three, tmp_path / "checkpoints")


def flip_bit(directory):
    file = directory / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_the_newest_checkpoint_is_taken_and_none_is_none(root, tmp_path):
    assert newest_whole(root) == checkpoints.directory(root, 3)
    assert newest_whole(tmp_path / "nowhere") is None


def test_damaged_checkpoints_give_way_to_the_one_before_and_are_set_aside(root):
    (checkpoints.directory(root, 3) / "manifest.json").unlink()
    flip_bit(checkpoints.directory(root, 2))
    with capture_logs() as logs:
        assert newest_whole(root) == checkpoints.directory(root, 1)
    said = {log["set_aside"].rpartition("_")[2]: log["damage"] for log in logs}
    assert "manifest.json" in said["00000003"]
    assert "the bytes of __0_0.distcp in" in said["00000002"]
    assert all(log["log_level"] == "error" for log in logs)
    assert checkpoints.steps(root) == [1]
    assert len(list(root.glob("damaged-*"))) == 2
    save_checkpoint(trainer_of(tiny_model()), root, 3, {}, keep=1)
    assert newest_whole(root) == checkpoints.directory(root, 3)
    flip_bit(checkpoints.directory(root, 3))
    save_checkpoint(trainer_of(tiny_model()), root, 2, {}, keep=2)
    assert newest_whole(root) == checkpoints.directory(root, 2)
    assert len(list(root.glob("damaged-*"))) == checkpoints.KEPT_DAMAGED


def test_a_torn_file_is_damage(root):
    torn = checkpoints.directory(root, 3) / "common.pt"
    torn.write_bytes(torn.read_bytes()[:-1])
    assert newest_whole(root) == checkpoints.directory(root, 2)


def test_one_of_the_supervised_stage_that_an_earlier_build_named_by_step_0_is_older_than_what_follows(root):
    save_checkpoint(trainer_of(tiny_model()), root, 0, {"stage": "warmup", "warmup_step": 4}, keep=9)
    for step in (1, 2, 3):
        shutil.rmtree(checkpoints.directory(root, step))
    earlier = checkpoints.directory(root, checkpoints.supervised(4))
    assert newest_whole(root) == earlier
    following = {"stage": "warmup", "warmup_step": 8}
    save_checkpoint(trainer_of(tiny_model()), root, checkpoint_step(following), following, keep=1)
    assert not earlier.exists()
    assert read_extra(newest_whole(root)) == following


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2}', "{"])
def test_a_garbled_manifest_is_damage(root, content):
    (checkpoints.directory(root, 3) / "manifest.json").write_text(content)
    assert newest_whole(root) == checkpoints.directory(root, 2)


def test_where_no_checkpoint_is_whole_the_run_ends_and_nothing_is_moved(root):
    for step in (1, 2, 3):
        flip_bit(checkpoints.directory(root, step))
    with pytest.raises(LostDataError, match=r"no checkpoint in .* is whole: .*move the directory away"):
        newest_whole(root)
    assert checkpoints.steps(root) == [1, 2, 3]


def test_a_checkpoint_of_another_build_is_refused_and_not_set_aside(root):
    path = checkpoints.directory(root, 3) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(ConfigError, match="has format 1, this build reads 2"):
        newest_whole(root)
    assert checkpoints.steps(root) == [1, 2, 3]


def test_a_rank_that_does_not_see_what_rank_0_sees_is_named(root, monkeypatch):
    monkeypatch.setattr(newest_checkpoint, "SEEN_WITHIN_S", 0.0)
    manifest = {"files": {"elsewhere.distcp": {"bytes": 1, "xxh3_128": ""}}}
    with pytest.raises(StorageError, match=r"rank 0 lacks elsewhere\.distcp of checkpoint"):
        newest_checkpoint._refuse_unseen(checkpoints.directory(root, 3), manifest)


def test_a_crash_while_a_checkpoint_is_replaced_costs_neither(root, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    pending = start_checkpoint(trainer_of(tiny_model()), root, 3, {"step": "again"}, keep=3)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            pending.finish()
    assert latest_checkpoint(root) == checkpoints.directory(root, 2)
    assert newest_whole(root) == checkpoints.directory(root, 3)
    assert read_extra(checkpoints.directory(root, 3)) == {"step": 3}
    assert not list(root.glob(".tmp-*"))


def test_what_is_kept_with_a_checkpoint_is_replaced_alone(root):
    trainer = trainer_of(tiny_model())
    train(trainer, range(1))
    pending = start_checkpoint(trainer, root, 4, {"stage": "rl"}, keep=3)
    pending.amend({"stage": "done"})
    directory = checkpoints.directory(root, 4)
    assert read_extra(directory) == {"stage": "done"}
    assert newest_whole(root) == directory
