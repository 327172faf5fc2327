"""`launch restore`: what retention put into the archive comes back into the run's replay."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from bus.codec import encode
from bus.errors import ConfigError, StorageError
from launch.operations.retrain import restore_run
from launch.run_view.run_files import recorded_config
from launch.settings.run_config import RunConfig
from storage.disk.run_directory import RunDirectory
from storage.settings.replay import ReplayConfig
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory


def group(lease_id: int):
    return [make_trajectory(lease_id, sample) for sample in range(2)]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two shards, each of which archived its first segment and kept another."""
    archive = str(tmp_path / "archive")
    run = RunDirectory(tmp_path / "runs", "mine")
    config = RunConfig(run="mine", replay=ReplayConfig(archive=archive, retain_bytes=0))
    run.config.write_text(config.model_dump_json())
    for shard in range(2):
        with closing(ReplayStore.open(run.replay(shard))) as store:
            for lease_id in (shard, shard + 2):
                store.append(group(lease_id))
            store.retire(store.entries[0], f"{archive}/mine")
    return run


def test_archived_trajectories_are_read_again_bit_for_bit(run: RunDirectory):
    assert [Path(path).name for path in restore_run(run, None)] == ["segment_00000000"] * 2
    for shard in range(2):
        with closing(ReplayStore.open(run.replay(shard), writable=False)) as store:
            assert [encode(t) for t in store.read([shard])] == [encode(t) for t in group(shard)]
    assert restore_run(run, None) == []


def test_an_archive_that_moved_is_named(run: RunDirectory, tmp_path: Path):
    (tmp_path / "archive").rename(tmp_path / "attic")
    with pytest.raises(StorageError, match="archive/mine/shard_00/segment_00000000"):
        restore_run(run, None)
    assert len(restore_run(run, str(tmp_path / "attic"))) == 2


def test_nothing_is_restored_while_storage_is_up(run: RunDirectory):
    with (
        closing(ReplayStore.open(run.replay(0))),
        pytest.raises(StorageError, match="written by another process: stop that one first"),
    ):
        restore_run(run, None)


def test_a_run_without_archive_or_settings_or_that_is_not_here_is_refused(tmp_path: Path):
    run = RunDirectory(tmp_path, "plain")
    with pytest.raises(ConfigError, match="no run 'plain' here"):
        recorded_config(run)
    assert not run.exists
    assert run.path.is_dir()
    with pytest.raises(ConfigError, match="does not hold the run's settings: give them with --config"):
        recorded_config(run)
    run.config.write_text(RunConfig().model_dump_json())
    with pytest.raises(ConfigError, match=r"has no replay\.archive: give its place with --archive"):
        restore_run(run, None)


def test_the_learners_own_settings_are_preferred_to_the_runs(tmp_path: Path):
    run = RunDirectory(tmp_path, "plain")
    run.config.write_text(RunConfig(seed=1).model_dump_json())
    run.learner_config.write_text(RunConfig(seed=2).model_dump_json(exclude={"bus"}))
    (tmp_path / "mine.toml").write_text("seed = 3")
    assert recorded_config(run).seed == 2
    assert recorded_config(run, tmp_path / "mine.toml").seed == 3
    run.learner_config.write_text('{"gone": 1}')
    with pytest.raises(ConfigError, match=f"{run.learner_config} has settings that .* unknown key gone"):
        recorded_config(run)


def test_settings_of_earlier_builds_that_say_nothing_of_training_are_left_out(tmp_path: Path):
    run = RunDirectory(tmp_path, "plain")
    recorded = RunConfig(seed=2).model_dump(mode="json")
    recorded["actors"]["weights"] |= dict.fromkeys(("site", "via", "keep", "directory", "timeout_s"))
    run.learner_config.write_text(json.dumps(recorded))
    assert recorded_config(run).seed == 2
    with pytest.raises(ConfigError, match=r"unknown key actors\.weights\.site"):
        recorded_config(run, run.learner_config)
