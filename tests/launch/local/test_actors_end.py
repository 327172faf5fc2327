"""How actors end: without a restart once the run is done, and with time for their rollouts when stopped."""

from pathlib import Path

from launch.local.local import _run_parts
from launch.local.supervisor import Part
from launch.settings.run_config import RunConfig
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory


def actors_of(config: RunConfig, run: RunDirectory) -> Part:
    return next(part for part in _run_parts(config, run) if part.name == "actors")


def test_actors_may_end_once_the_run_is_done(tmp_path: Path):
    run = RunDirectory(tmp_path, "mine")
    actors = actors_of(RunConfig(run="mine", directory=tmp_path), run)
    assert not actors.may_end()  # somebody stopped them: they are started again
    for stage, may_end in (("rl", False), ("done", True)):
        write_json(run.path / "progress.json", {"stage": stage})
        assert actors.may_end() is may_end


def test_actors_are_not_killed_while_rollouts_may_still_end(tmp_path: Path):
    config = RunConfig.model_validate(
        {"run": "mine", "directory": tmp_path, "actors": {"interruption": {"finish_within_s": 600}}}
    )
    assert actors_of(config, RunDirectory(tmp_path, "mine")).drain_s == 645
