"""Rewards of a mixture's groups reach the ledger and the metrics, whether stored or filtered out."""

import asyncio
import json
from functools import partial

import pytest

from bus.codec import encode
from bus.messages import GroupRejected, Metrics
from bus.streams.publish import Publisher
from storage.ledger.given_groups import Use
from storage.ledger.ledger import Ledger
from storage.prompts.curriculum import TOLD, SourceSuccess, report_sources
from storage.prompts.sources import load_sources
from storage.settings.admission import AdmissionConfig
from storage.settings.data import PromptKeys, SourceConfig
from tests.factories import make_trajectory
from tests.storage.serving import has, opened, running, send, until

pytestmark = pytest.mark.nats
ADMISSION = AdmissionConfig(groups_per_step=2, samples_per_prompt=2, max_staleness=1)


def configure(storage, directory):
    """Mix two sources, a and b, half and half: leases 0, 2, ... are of a."""
    for name in "ab":
        lines = (json.dumps({"prompt": f"{name}{n}"}) for n in range(9))
        (directory / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [SourceConfig(name=name, prompts=directory / f"{name}.jsonl") for name in "ab"]
    prompts, mixed = load_sources(sources, PromptKeys(), directory)
    storage.data.configure(prompts, seed=0, shuffle=False, source="both", sources=mixed)


async def test_stored_and_filtered_groups_count_by_source_and_each_step_tells_it(bus, learner, tmp_path):
    told: asyncio.Queue[Metrics] = asyncio.Queue()
    with opened(bus, tmp_path, ADMISSION) as storage:
        configure(storage, tmp_path)
        success = SourceSuccess(storage.ledger, storage.data)
        storage.dispatcher.admit()

        async def run(stop: asyncio.Event) -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(storage.run(stop, reissue=False))
                tasks.create_task(report_sources(bus, storage.ledger, storage.data, success, stop))

        async with running(run):
            await bus.listen(bus.subject("events", "metrics"), Metrics, told.put_nowait)
            await learner.publish(0)
            await has(bus, "TASKS", 4)
            await send(bus, *(make_trajectory(0, n, reward=float(n)) for n in range(2)))
            rejected = GroupRejected(lease_id=1, reason="zero_variance", rewards=(1.0, 1.0))
            await Publisher(bus).publish(
                bus.subject("outcomes", "rejected"), encode(rejected), message_id="rejected-1"
            )
            await send(bus, *(make_trajectory(2, n, reward=0.0) for n in range(2)))
            await until(lambda: success.of("a").groups == 2 and success.of("b").groups == 1)
            assert await learner.batch(1) == [0, 2]
            values = (await asyncio.wait_for(told.get(), 60)).values
    assert values["source/a/groups_in_step"] == 2
    assert values["source/b/groups_in_step"] == 0
    assert (values["source/a/share"], values["source/b/share"]) == (0.5, 0.5)
    assert values["source/a/reward"] in (
        pytest.approx(0.5 * 63 / 64 / (1 + 63 / 64)),
        pytest.approx(0.5 / (1 + 63 / 64)),
    )  # by the order of their shards
    assert values["source/b/solved"] == 1.0


def give(ledger: Ledger, *steps: int) -> None:
    """Give each step one group."""
    for step in steps:
        [lease_id] = ledger.issue(1, policy_version=0)
        ledger.store(lease_id)
        ledger.lease(step, [lease_id])
    ledger.flush()


async def test_steps_are_told_once_and_again_where_a_learner_resumed_before_them(bus, tmp_path, monkeypatch):
    """Nothing is read again meanwhile: a step of thousands of groups holds up the dispatcher."""
    monkeypatch.setattr("storage.prompts.curriculum.PERIOD_S", 0.01)
    asked: list[int] = []
    uses = Ledger.uses

    def looking(self: Ledger, step: int) -> list[Use]:
        asked.append(step)
        return uses(self, step)

    told: list[int] = []
    await bus.listen(bus.subject("events", "metrics"), Metrics, lambda metrics: told.append(metrics.step))
    with opened(bus, tmp_path, ADMISSION) as storage:
        configure(storage, tmp_path)
        ledger, success = storage.ledger, SourceSuccess(storage.ledger, storage.data)
        give(ledger, 1, 2, 3)
        ledger.forget(3, oldest_version=1)
        monkeypatch.setattr(Ledger, "uses", looking)
        async with running(partial(report_sources, bus, ledger, storage.data, success)):
            await until(lambda: told == [1, 2, 3])
            asked.clear()
            await until(lambda: len(asked) > 5)
            assert set(asked) == {4}  # what the next step would be
            ledger.roll_back(1)
            await until(lambda: ledger.facts[TOLD] == "1")
            give(ledger, 2)
            await until(lambda: told == [1, 2, 3, 2])
