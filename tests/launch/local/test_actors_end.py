"""Actors that end because the run is done are not started again, however long the learner takes to end."""

from pathlib import Path

from launch.config import RunConfig
from launch.local.local import _run_parts
from storage.disk.run_directory import RunDirectory


def test_actors_may_end_once_the_run_is_done(tmp_path: Path):
    run = RunDirectory(tmp_path, "mine")
    actors = next(
        part for part in _run_parts(RunConfig(run="mine", directory=tmp_path), run) if part.name == "actors"
    )
    assert not actors.may_end()  # somebody stopped them: they are started again
    for stage, may_end in (("rl", False), ("done", True)):
        run.write_json(run.path / "progress.json", {"stage": stage})
        assert actors.may_end() is may_end
