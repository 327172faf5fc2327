"""A shadow beside a real learner on a real bus: what it trains on, and that nobody notices it."""

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import ConfigError
from bus.messages import Metrics, RoleHolder, Status
from bus.topology import ensure
from learner.backends.megatron.trainer import Trainer
from learner.config.loss import PPOClipLoss
from learner.progress.lineage import TrainedStep
from storage.disk import checkpoints
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.mini_run import LEARNER, LIMIT_S, MiniRun, mini_run
from tests.storage.serving import SHARDS, LearnerStandIn, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("in_process")]


def ledger_of(run: MiniRun) -> tuple[list, list, int, str]:
    """Return what is settled in it: leases that the learner has issued beyond the last step come and go."""
    run.storage.ledger.flush()
    with closing(sqlite3.connect(run.directory / "ledger.sqlite")) as ledger:
        leases = ledger.execute("SELECT * FROM leases WHERE state = 'committed'").fetchall()
        uses = ledger.execute("SELECT * FROM uses").fetchall()
    return leases, uses, run.storage.ledger.account().rejected, run.storage.ledger.facts["committed"]


def what(steps: dict[int, TrainedStep]) -> list[TrainedStep]:
    """Steps without who trained them."""
    return [replace(step, incarnation="") for step in steps.values()]


async def trained_beside(run: MiniRun, shadows: int) -> list[Metrics]:
    """A learner from beginning to end, a shadow beside it or not; the metrics that it sent."""
    heard: list[Metrics] = []
    await run.bus.listen(run.bus.subject("events", "metrics"), Metrics, heard.append)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(shadows):
            tasks.create_task(run.follow(asyncio.Event(), loss=PPOClipLoss()))
        await run.train()
    await run.bus.client.flush()
    return [metrics for metrics in heard if metrics.source == "learner"]


@pytest.mark.slow
async def test_nobody_notices_a_shadow(bus_server, tmp_path: Path, monkeypatch):
    runs, metrics, prepared = [], [], []
    monkeypatch.setattr(Trainer, "prepare_checkpoints", lambda trainer: prepared.append(trainer))
    for shadows, name in enumerate(("alone", "observed")):
        (tmp_path / name).mkdir()
        async with Bus.connect(BusConfig(url=bus_server.url), name, name=name) as bus:
            await ensure(bus.js, bus.topology, SHARDS)
            await bus.create_keys()
            async with mini_run(bus, tmp_path / name) as run:
                metrics.append(await trained_beside(run, shadows))
                runs.append((ledger_of(run), what(run.steps())))
                shadow = run.shadow_steps()
    assert runs[0] == runs[1]
    assert len(prepared) == 2, "a shadow, which saves nothing, locks no memory"
    assert all(metrics[1][-1].values[f"time/checkpoint_{part}_s"] >= 0 for part in ("memory", "state"))
    untimed = [
        [
            (m.step, {k: v for k, v in m.values.items() if not k.startswith(("time/", "replay/read_"))})
            for m in each
        ]
        for each in metrics
    ]
    assert untimed[0] == untimed[1]
    assert [step.leases for step in shadow.values()] == [step.leases for step in runs[1][1]]
    assert shadow[4].loss != runs[1][1][3].loss  # its weights are its own by now


@pytest.mark.slow
async def test_with_the_same_objective_it_comes_to_the_same_weights_also_over_a_restart(bus, tmp_path):
    heard: list[Status] = []
    await bus.listen(bus.subject("status", "shadow"), Status, heard.append)
    async with mini_run(bus, tmp_path) as run, asyncio.TaskGroup() as tasks:
        run.hold(after_step=2)
        learner = tasks.create_task(run.train())
        stop = asyncio.Event()
        following = tasks.create_task(run.follow(stop))
        await until(lambda: 1 in run.shadow_steps(), seconds=LIMIT_S)
        stop.set()
        reached = (await following).step
        run.release()
        await learner
        progress = await run.follow(asyncio.Event())
    assert 1 <= reached <= 2
    assert what(run.shadow_steps()) == what(run.steps())
    assert (progress.step, progress.trajectories_trained, progress.rollbacks) == (4, 4 * 6, 0)
    numbers = [json.loads(line) for line in (tmp_path / "shadow/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in numbers] == [1, 2, 3, 4]
    assert {"policy/ess_fraction", "policy/k3_nats", "shadow/lag_steps"} <= numbers[0].keys()
    assert {line["source"] for line in numbers} == {"learner-shadow-other"} == {s.source for s in heard}


@pytest.mark.slow
async def test_it_may_begin_from_a_checkpoint_of_the_learner(bus, tmp_path):
    async with mini_run(bus, tmp_path) as run:
        await run.train()
        begin = checkpoints.directory(tmp_path / "checkpoints", 2)
        progress = await run.follow(asyncio.Event(), from_checkpoint=begin)
    assert what(run.shadow_steps()) == what(run.steps())[2:]
    assert progress.trajectories_trained == 2 * 6


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 1000], ids=["to the beginning", "to a checkpoint"])
async def test_it_goes_back_with_a_learner_that_resumes_and_gets_other_groups(bus, tmp_path, keep):
    async with mini_run(bus, tmp_path) as run:
        unsaved = LEARNER.checkpoint.model_copy(update={"save_every": 1000})
        kept = LEARNER.checkpoint.model_copy(update={"keep": keep})
        async with asyncio.TaskGroup() as tasks:  # one that fails ends the test at once
            run.hold(after_step=5)
            learner = tasks.create_task(run.train(steps=6, checkpoint=unsaved))
            following = tasks.create_task(run.follow(asyncio.Event(), steps=6, checkpoint=kept))
            await until(lambda: 5 in run.shadow_steps(), seconds=LIMIT_S)
            learner.cancel()
            await asyncio.wait({learner}, timeout=LIMIT_S)
            assert learner.cancelled()
            first_life = run.shadow_steps()
            await LearnerStandIn(bus, "between").resume(0)
            assert run.storage.ledger.reject(first_life[3].leases[0], "test")
            run.release()
            await run.train(steps=6)
        progress = following.result()
    assert progress.rollbacks == 1
    lives = what(run.shadow_steps())
    assert lives == what(run.steps())
    assert [step.leases == first_life[step.step].leases for step in lives[:5]] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert latest_checkpoint(tmp_path / "shadow/checkpoints").name == "step_00000006"


@pytest.mark.slow
async def test_steps_whose_groups_were_retired_are_passed_over_and_counted(bus, tmp_path):
    async with mini_run(bus, tmp_path) as run:
        await run.train(steps=3)
        used = {lease for step in run.steps().values() for lease in step.leases}
        for store in run.storage.stores:
            for entry in store.entries:
                if used.issuperset(store.leases_of(entry).tolist()):
                    store.retire(entry, None)
        await run.train(steps=5)
        progress = await run.follow(asyncio.Event(), steps=5)
    assert (progress.step, progress.steps_retired) == (5, 3)
    seen, expected = what(run.shadow_steps()), what(run.steps())[3:]
    assert [step.batch_xxh3 for step in seen] == [step.batch_xxh3 for step in expected]
    assert [step.loss for step in seen] != [step.loss for step in expected]


async def test_two_shadows_of_one_name_are_refused(bus, tmp_path, connect):
    async with mini_run(bus, tmp_path) as run, connect("second") as other:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run.follow(stop))
            await until(lambda: holder_of(bus), seconds=LIMIT_S)
            with pytest.raises(ConfigError, match="already has a learner-shadow-other: process"):
                await replace(run, bus=other).follow(stop)
            stop.set()


async def holder_of(bus: Bus) -> bool:
    return await bus.get("role.learner-shadow-other", RoleHolder) is not None
