"""The end of a run: what is saved as done has been exported."""

import asyncio
import errno
import json
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from bus.config import ColocationConfig
from bus.errors import NoActorsError, StorageError, TrainingError
from bus.messages import PolicyManifest
from bus.requests import BatchLease
from learner.checkpoint.commit import read_extra
from learner.config.diagnostics import DiagnosticsConfig
from learner.publication import probe
from learner.run import service
from learner.run.colocation import Device
from learner.run.train import Learner
from learner.world import rank
from storage.dispatch import absent_actors
from tests.learner.mini_run import mini_run
from tests.storage.serving import until

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.usefixtures("in_process")]


async def test_a_learner_goes_on_from_the_checkpoint_before_a_damaged_one(bus, tmp_path):
    async with mini_run(bus, tmp_path) as run:
        await run.train()
        before = {step: (line.leases, line.loss) for step, line in run.steps().items()}
        [weights] = (tmp_path / "checkpoints/step_00000004").glob("__0_0.distcp")
        weights.write_bytes(weights.read_bytes()[:-1])
        progress = await run.train(steps=6)
        assert (progress.stage, progress.step) == ("done", 6)
        after = {step: (line.leases, line.loss) for step, line in run.steps().items()}
    assert list(after) == [1, 2, 3, 4, 5, 6]
    assert {step: after[step] for step in before} == before  # steps 3 and 4 once more, bit for bit
    assert (tmp_path / "checkpoints/damaged-step_00000004").is_dir()


async def test_a_learner_that_fails_while_a_checkpoint_is_written_goes_on_from_that_one(
    bus, tmp_path, monkeypatch
):
    train = Learner._train_on

    async def fails_at_step_3(learner: Learner, lease: BatchLease):
        if lease.step == 3:
            raise TrainingError("no room")
        return await train(learner, lease)

    async with mini_run(bus, tmp_path) as run:
        with monkeypatch.context() as patch:
            patch.setattr(Learner, "_train_on", fails_at_step_3)
            with pytest.raises(ExceptionGroup):
                await run.train()
        before = run.steps()
        assert list(before) == [1, 2]
        assert read_extra(tmp_path / "checkpoints/step_00000002")["step"] == 2
        await run.train()
        assert {step: run.steps()[step] for step in before} == before  # none was trained again


async def test_an_export_that_the_disk_refuses_costs_no_training(bus, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    async with mini_run(bus, tmp_path) as run:
        settings = run.settings()
        with monkeypatch.context() as patch:
            patch.setattr(rank, "stream_hf_directory", refuse)
            with pytest.raises(ExceptionGroup) as ended:
                await service.run(bus, settings, run.demonstrations, asyncio.Event())
        assert ended.group_contains(StorageError, match="export: the disk is full")
        saved = read_extra(settings.checkpoints / "step_00000004")
        assert (saved["stage"], saved["step"]) == ("rl", 4)
        before = run.steps()
        progress = await run.train()
        assert run.steps() == before  # none was trained again
    assert (progress.stage, progress.step) == ("done", 4)


async def test_a_learner_whose_actors_ended_for_good_saves_what_it_has_and_says_why(
    bus, tmp_path, monkeypatch
):
    monkeypatch.setattr(absent_actors, "ENDS_AFTER_S", 0.5)
    async with mini_run(bus, tmp_path) as run:
        run.hold(after_step=3)  # no multiple of those after which a checkpoint is due
        learner = asyncio.create_task(run.train())
        await until(lambda: 3 in run.steps(), seconds=60)
        ended = {"source": "actor-1", "time_s": 1.0, "ended": "of the latest 64 rollouts, 64 failed"}
        run.storage.dispatcher.absent_actors.write(ended)
        with pytest.raises(ExceptionGroup) as raised:
            await learner
        assert raised.group_contains(NoActorsError, match="actor-1: of the latest 64 rollouts, 64 failed")
        assert json.loads((tmp_path / "progress.json").read_text())["step"] == 3
        before = run.steps()
        run.release()
        run.storage.dispatcher.absent_actors.write({"source": "a", "time_s": 2.0, "engine/busy_s": 1.0})
        progress = await run.train()
        assert {step: run.steps()[step] for step in before} == before  # none was trained again
    assert (progress.stage, progress.step) == ("done", 4)


async def test_metrics_that_the_bus_refuses_are_missed_by_screens_alone_and_said_to_be(bus, tmp_path):
    async with mini_run(bus, tmp_path) as run:
        events = (await bus.js.stream_info(bus.topology.stream("EVENTS"))).config
        await bus.js.update_stream(events.evolve(max_msg_size=1))
        with capture_logs() as logs:
            progress = await run.train()
    assert (progress.stage, progress.step) == ("done", 4)
    line, *_ = [entry for entry in logs if entry["event"] == "step_trained"]  # at most one in 10 s
    assert (line["stage"], line["step"]) == ("warmup", 1)
    assert line["loss"] > 0
    missed = [entry for entry in logs if entry["event"] == "metrics_not_published"]
    assert len(missed) == 2 + 4
    assert all("the stream refuses" in entry["reason"] for entry in missed)


async def test_a_learner_stopped_while_it_waits_for_the_device_to_export_is_taken_up_again(
    bus, tmp_path, monkeypatch
):
    yielded = Device._yielded

    async with mini_run(bus, tmp_path) as run:

        async def last_one_comes_too_late(device: Device, stop: asyncio.Event) -> bool:
            if 4 in run.steps():
                stop.set()
            return await yielded(device, stop)

        settings = replace(run.settings(), colocation=ColocationConfig(enabled=True))
        with monkeypatch.context() as patch:
            patch.setattr(Device, "_yielded", last_one_comes_too_late)
            async with asyncio.timeout(60):
                stopped = await service.run(bus, settings, run.demonstrations, asyncio.Event())
        assert stopped is not None
        assert (stopped.stage, stopped.step) == ("rl", 4)
        assert not settings.export.exists()
        async with asyncio.timeout(60):
            again = await service.run(bus, settings, run.demonstrations, asyncio.Event())
        assert again is not None
        assert (again.stage, again.step) == ("done", 4)
        assert read_extra(settings.checkpoints / "step_00000004")["stage"] == "done"
        assert (settings.export / "config.json").is_file()
        published = await bus.get("policy", PolicyManifest)
        assert published is not None
        assert published[0].stage == "done"


async def test_each_trained_version_says_the_effective_sample_size_of_its_step_and_the_first_has_the_probe(
    bus, tmp_path, monkeypatch
):
    monkeypatch.setattr(probe, "LARGEST_PART", 1e-9)  # all versions are passed over that may be
    rollouts_are_drawn = DiagnosticsConfig(largest_mismatch_nats=None)  # by nobody's policy: no alarm
    heard: list[PolicyManifest] = []
    await bus.listen(bus.subject("notice", "policy"), PolicyManifest, heard.append)
    async with mini_run(bus, tmp_path) as run:
        await run.train(diagnostics=rollouts_are_drawn)
    figures = {manifest.policy_version: manifest.ess_fraction for manifest in heard if manifest.stage == "rl"}
    assert list(figures) == [1, 2, 3, 4, 5]
    assert figures.pop(1) is None  # the warm-up made it
    assert all(figure is not None and 0 < figure <= 1 for figure in figures.values())
    assert {manifest.policy_version for manifest in heard if manifest.probe is not None} == {0, 1}
