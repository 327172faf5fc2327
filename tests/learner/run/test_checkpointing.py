"""What storage is told of a checkpoint that is written while training goes on."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bus.errors import BusError, FencedError, TrainingError
from learner.config.learner import CheckpointConfig, LearnerConfig
from learner.config.model import ModelConfig
from learner.config.process_settings import LearnerSettings
from learner.config.warmup import WarmupConfig
from learner.progress.progress import Progress
from learner.run.checkpointing import Checkpointing
from learner.world.rank import Rank
from storage.settings.evaluation import EvaluationConfig
from tests.learner.mini_run import SCRATCH


class SlowDisk:
    """The calls that checkpoints make to a learner's world, whose files are written when a test says so."""

    def __init__(self) -> None:
        self.written, self.takes_calls = False, True
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    async def call(self, method, *arguments):
        """Answer as the world's ranks do."""
        if method is Rank.written:
            return self.written
        self.calls.append((method.__name__, arguments))
        if method is Rank.save:
            self.written = False
        return None


@pytest.fixture
def settings(tmp_path: Path) -> LearnerSettings:
    return LearnerSettings(
        model=ModelConfig(scratch=SCRATCH, dtype="float32"),
        warmup=WarmupConfig(steps=0),
        learner=LearnerConfig(checkpoint=CheckpointConfig(save_every=2)),
        evaluation=EvaluationConfig(every_versions=0),
        samples_per_prompt=2,
        seed=3,
        model_directory=tmp_path / "model",
        checkpoints=tmp_path / "checkpoints",
        progress=tmp_path / "progress.json",
        lineage=tmp_path / "lineage.jsonl",
        export=tmp_path / "export",
    )


async def nothing() -> None:
    """No version is to stay."""


async def test_storage_commits_the_step_that_was_saved_however_far_training_is_by_then(settings):
    world, told, progress = SlowDisk(), [], Progress(stage="rl")
    doing: list[str] = []

    async def prepared() -> None:
        assert "keep_versions" in doing[-1], "screens say what a checkpoint waits for"

    async def committed(step: int) -> None:
        saved = json.loads(settings.progress.read_text())  # durable before storage may forget its groups
        told.append((step, saved["step"], world.calls[-1][0]))

    checkpoints = Checkpointing(
        settings, world, progress, prepared=prepared, committed=committed, on_doing=doing.append
    )
    for step in range(1, 6):
        progress.step, progress.groups[str(step)] = step, [step]
        await checkpoints.after_step()
    assert told == []  # the disk still writes the checkpoint of step 2
    [(name, (step, extra))] = world.calls
    assert (name, step, extra["step"], extra["groups"]) == ("save", 2, 2, {"1": [1], "2": [2]})
    assert checkpoints.saved_step == 2

    world.written = True
    progress.step = 7  # no multiple of 2, but it has passed two
    await checkpoints.after_step()  # and the next one is begun, of the step that training is at
    assert told == [(2, 2, "saved")]
    assert [(name, arguments[:1]) for name, arguments in world.calls] == [
        ("save", (2,)), ("saved", ()), ("save", (7,)),
    ]  # fmt: skip

    progress.step, world.written = 8, True
    await checkpoints.finish()
    await checkpoints.finish()
    assert told[1:] == [(7, 7, "saved")]


async def test_the_disk_has_the_lineage_before_a_checkpoint_of_its_steps_is_written(settings, monkeypatch):
    world, progress, synced = SlowDisk(), Progress(stage="rl", step=2), []
    settings.lineage.write_text("{}\n")

    def fsync(file: int) -> None:
        synced.append((os.fstat(file).st_ino, list(world.calls)))

    monkeypatch.setattr("learner.progress.lineage.os.fsync", fsync)
    await Checkpointing(
        settings, world, progress, prepared=nothing, committed=lambda step: None, on_doing=lambda doing: None
    ).begin()
    assert (settings.lineage.stat().st_ino, []) in synced
    assert [name for name, _ in world.calls] == ["save"]


async def test_storage_hears_nothing_of_a_checkpoint_that_could_not_be_written(settings):
    told: list[int] = []

    async def committed(step: int) -> None:
        told.append(step)

    class Broken(SlowDisk):
        async def call(self, method, *arguments):
            if method is Rank.saved:
                raise OSError("the disk refuses")
            return await super().call(method, *arguments)

    world, progress = Broken(), Progress(stage="rl", step=2)
    checkpoints = Checkpointing(
        settings, world, progress, prepared=nothing, committed=committed, on_doing=lambda _: None
    )
    await checkpoints.begin()
    world.written = True
    with pytest.raises(OSError, match="refuses"):
        await checkpoints.finish()
    assert told == []
    assert not settings.progress.exists()


@pytest.mark.parametrize(
    ("error", "takes_calls", "reason"),
    [
        (TrainingError("no room"), True, None),
        (ExceptionGroup("tasks", [BusError("refused")]), True, None),
        (TrainingError("no room"), False, "no room"),
        (FencedError("taken over"), True, "taken over"),
        (asyncio.CancelledError(), True, "another rank failed, or another learner took over"),
    ],
)
async def test_a_checkpoint_under_way_when_the_learner_fails_is_named_or_said_to_be_lost(
    settings, error, takes_calls, reason
):
    world, told = SlowDisk(), []

    async def committed(step: int) -> None:
        told.append(step)

    checkpoints = Checkpointing(
        settings, world, Progress(stage="rl", step=2),
        prepared=nothing, committed=committed, on_doing=lambda _: None,
    )  # fmt: skip
    await checkpoints.begin()
    world.written, world.takes_calls = True, takes_calls
    with capture_logs() as logs:
        await checkpoints.rescue(error)
        await checkpoints.rescue(error)
    [line] = logs
    named = reason is None
    assert (line["event"], line["step"]) == ("checkpoint_rescued" if named else "checkpoint_lost", 2)
    assert line.get("reason") == reason
    assert named or "smaller learner.checkpoint.save_every" in line["remedy"]
    assert [name for name, _ in world.calls] == ["save", "saved"][: 1 + named]
    assert settings.progress.exists() == named
    assert told == []  # by the next learner: the bus may be what failed
