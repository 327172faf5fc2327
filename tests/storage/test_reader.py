"""The learner's reader against storage on a real bus, which comes and goes."""

import asyncio

import pytest

from bus.codec import encode
from bus.errors import BusError, FencedError
from storage import reader as reader_module
from storage.reader import ReplayReader
from tests.factories import make_trajectory
from tests.storage.serving import LearnerStandIn, has, send, send_groups, serving, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


class Heard(list):
    """What the reader said that it waits for."""

    def of(self, text: str) -> bool:
        return any(text in reason for reason in self)


async def start_run(bus, incarnation: str = "a") -> None:
    await LearnerStandIn(bus, incarnation).publish(0)
    await has(bus, "TASKS", 4)


async def test_batch_holds_the_siblings_in_order_from_every_shard(bus, tmp_path):
    async with serving(bus, tmp_path):
        await start_run(bus)
        for lease_id in (1, 0):
            for sample in (1, 0):
                await send(bus, make_trajectory(lease_id, sample))
        batch = await ReplayReader(bus, "a").batch(1, 0, on_wait=Heard().append)
    expected = [[make_trajectory(lease_id, sample) for sample in range(2)] for lease_id in range(2)]
    assert [list(map(encode, group)) for group in batch.groups] == [
        list(map(encode, group)) for group in expected
    ]
    assert batch.weights == [1.0, 1.0]


async def test_batch_waits_with_the_reason_through_a_restart_of_storage(bus, tmp_path, connect):
    heard = Heard()
    async with connect("learner") as other:
        async with serving(bus, tmp_path):
            await start_run(bus)
            await send_groups(bus, [0])
            batch = asyncio.create_task(ReplayReader(other, "a").batch(1, 0, on_wait=heard.append))
            await until(lambda: heard.of("1 of 2 groups are stored, 3 rolling out"))
        await until(lambda: heard.of("storage does not answer: nobody serves"))
        async with serving(bus, tmp_path):
            await send_groups(bus, [3])
            async with asyncio.timeout(5):
                groups = (await batch).groups
    assert [[t.lease_id for t in group] for group in groups] == [[0, 0], [3, 3]]


async def test_learner_that_resumes_reads_the_uncommitted_steps_again(bus, tmp_path):
    async with serving(bus, tmp_path) as storage:
        first = ReplayReader(bus, "a")
        await first.resumed(0)
        await start_run(bus)
        await send_groups(bus, range(4))
        batches = [await first.batch(step, step - 1, on_wait=Heard().append) for step in (1, 2)]
        await first.committed(1)
        second = ReplayReader(bus, "b")
        await second.resumed(1)
        again = await second.batch(2, 1, on_wait=Heard().append)
        assert [t.trajectory_id for group in again.groups for t in group] == [
            t.trajectory_id for group in batches[1].groups for t in group
        ]
        assert storage.ledger.account().trained == 4
        for refused in (first.batch(3, 2, on_wait=Heard().append), first.committed(2)):
            with pytest.raises(FencedError, match="learner a was replaced by b"):
                await refused


async def test_commit_and_resume_wait_for_storage_to_start(bus, tmp_path):
    reader = ReplayReader(bus, "a")
    telling = asyncio.create_task(reader.resumed(0))
    async with serving(bus, tmp_path) as storage:
        async with asyncio.timeout(5):
            await telling
        await reader.committed(0)
        assert storage.ledger.facts["incarnation"] == "a"


async def test_silence_is_borne_for_its_limit_in_time_not_in_attempts(bus, monkeypatch):
    monkeypatch.setattr(reader_module, "SILENCE_LIMIT_S", 0.5)
    heard, began = Heard(), asyncio.get_running_loop().time()
    with pytest.raises(BusError, match="nobody serves"):
        await ReplayReader(bus, "a").batch(1, 0, on_wait=heard.append)
    assert asyncio.get_running_loop().time() - began >= 0.5
    assert len(heard) > 3
    with pytest.raises(BusError, match="nobody serves"):
        await ReplayReader(bus, "a").committed(1)
