"""The learner's reader against storage on a real bus, which comes and goes."""

import asyncio
from dataclasses import replace
from math import inf, nan

import pytest

from bus.codec import encode
from bus.errors import BusAwayError, BusError, FencedError, StorageError
from bus.requests import BatchLease, BatchRequest, Done, GroupRef
from storage.client import reader as reader_module
from storage.client.reader import ReplayReader
from tests.factories import make_trajectory
from tests.storage.serving import SMALL, LearnerStandIn, has, read_batch, send, send_groups, serving, until

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
        reader = ReplayReader(bus, "a")
        lease = await reader.lease(1, 0, on_wait=Heard().append)
        groups = await reader.fetch(lease.groups)
    expected = [[make_trajectory(lease_id, sample) for sample in range(2)] for lease_id in range(2)]
    assert [list(map(encode, group)) for group in groups] == [list(map(encode, group)) for group in expected]
    assert [group.weight for group in lease.groups] == [1.0, 1.0]


async def test_lease_says_how_long_groups_are_and_each_rank_fetches_its_own(bus, tmp_path):
    admission = SMALL.model_copy(update={"groups_per_step": 4})
    async with serving(bus, tmp_path, admission):
        await LearnerStandIn(bus).publish(0)
        await has(bus, "TASKS", 8)
        for lease_id in range(4):
            for sample in range(2):
                await send(bus, make_trajectory(lease_id, sample, tokens=8 + 2 * lease_id))
        lease = await ReplayReader(bus, "a").lease(1, 0, on_wait=Heard().append)
        assert [(ref.lease_id, ref.tokens) for ref in lease.groups] == [(0, 16), (1, 20), (2, 24), (3, 28)]
        ranks = [ReplayReader(bus, "a") for _ in range(2)]
        parts = [lease.groups[::-3], lease.groups[1:3]]
        fetched = [await rank.fetch(part) for rank, part in zip(ranks, parts, strict=True)]
        assert await ranks[0].fetch(()) == []
    found = [[[t.trajectory_id for t in group] for group in groups] for groups in fetched]
    assert found == [
        [["g00000003.0", "g00000003.1"], ["g00000000.0", "g00000000.1"]],
        [["g00000001.0", "g00000001.1"], ["g00000002.0", "g00000002.1"]],
    ]


@pytest.mark.slow
async def test_fetch_outlasts_a_restart_of_storage(bus, tmp_path, connect):
    heard = Heard()
    async with connect("learner") as other:
        reader = ReplayReader(other, "a")
        async with serving(bus, tmp_path):
            await start_run(bus)
            await send_groups(bus, [0, 1])
            lease = await reader.lease(1, 0, on_wait=heard.append)
        fetching = asyncio.create_task(reader.fetch(lease.groups, on_wait=heard.append))
        await until(lambda: heard.of("shard 0 does not answer") and heard.of("shard 1 does not answer"))
        async with serving(bus, tmp_path), asyncio.timeout(60):
            groups = await fetching
    assert [len(group) for group in groups] == [2, 2]


async def test_batch_waits_with_the_reason_through_a_restart_of_storage(bus, tmp_path, connect):
    heard = Heard()
    async with connect("learner") as other:
        async with serving(bus, tmp_path):
            await start_run(bus)
            await send_groups(bus, [0])
            batch = asyncio.create_task(read_batch(ReplayReader(other, "a"), 1, on_wait=heard.append))
            await until(lambda: heard.of("1 of 2 groups are stored, 3 rolling out"))
        await until(lambda: heard.of("storage does not answer: nobody serves"))
        async with serving(bus, tmp_path):
            await send_groups(bus, [3])
            async with asyncio.timeout(60):
                groups = await batch
    assert [[t.lease_id for t in group] for group in groups] == [[0, 0], [3, 3]]


async def test_learner_that_resumes_reads_the_uncommitted_steps_again(bus, tmp_path):
    async with serving(bus, tmp_path) as storage:
        first = ReplayReader(bus, "a")
        await first.resumed(0)
        await start_run(bus)
        await send_groups(bus, range(4))
        batches = [await read_batch(first, step) for step in (1, 2)]
        await first.committed(1)
        assert storage.ledger.facts["committed"] == "1"
        second = ReplayReader(bus, "b")
        await second.resumed(1)
        again = await read_batch(second, 2)
        assert [t.trajectory_id for group in again for t in group] == [
            t.trajectory_id for group in batches[1] for t in group
        ]
        assert storage.ledger.account().trained == 4
        for refused in (read_batch(first, 3), first.committed(2)):
            with pytest.raises(FencedError, match="learner a was replaced by b"):
                await refused


async def test_commit_and_resume_wait_for_storage_to_start(bus, tmp_path):
    reader = ReplayReader(bus, "a")
    telling = asyncio.create_task(reader.resumed(0))
    async with serving(bus, tmp_path) as storage:
        async with asyncio.timeout(60):
            await telling
        await reader.committed(0)
        assert storage.ledger.facts["incarnation"] == "a"


async def test_silence_is_borne_for_its_limit_in_time_not_in_attempts(bus, monkeypatch):
    monkeypatch.setattr(bus, "patience_s", 0.5)
    heard, began = Heard(), asyncio.get_running_loop().time()
    with pytest.raises(BusAwayError, match=r"storage did not answer for \d s: .*nobody serves"):
        await read_batch(ReplayReader(bus, "a"), 1, on_wait=heard.append)
    assert asyncio.get_running_loop().time() - began >= 0.5
    assert len(heard) > 3
    with pytest.raises(BusAwayError, match="nobody serves"):
        await ReplayReader(bus, "a").committed(1)


async def test_what_is_no_batch_of_this_step_and_learner_is_asked_for_again(bus, monkeypatch):
    ours = BatchLease(step=1, groups=(GroupRef(lease_id=3, shard=0),), given_to="a")
    [group] = ours.groups
    answers = [
        replace(ours, step=2),
        replace(ours, given_to="b"),
        replace(ours, groups=(group, group)),
        *(replace(ours, groups=(replace(group, weight=weight),)) for weight in (nan, inf, 0.0, -1.0)),
        ours,
    ]
    coming, heard = iter(answers), Heard()

    async def answer(_: BatchRequest) -> list[BatchLease]:
        return [next(coming)]

    monkeypatch.setattr(reader_module, "RETRY_S", 0.0)
    await bus.serve(bus.subject("rpc", "batch"), BatchRequest, answer)
    async with asyncio.timeout(60):
        assert await ReplayReader(bus, "a").lease(1, 0, on_wait=heard.append) == ours
    assert len(heard) == len(answers) - 1
    for said in ("by 'a' and gives step 2", "to 'b'", "has weight nan", "a group more than once"):
        assert heard.of(said)


async def test_a_refusal_is_believed_long_before_a_silence(bus, monkeypatch):
    async def refuse(_: BatchRequest) -> list[Done]:
        raise StorageError("the ledger is damaged")

    monkeypatch.setattr(reader_module, "REFUSAL_LIMIT_S", 0.3)
    await bus.serve(bus.subject("rpc", "batch"), BatchRequest, refuse)
    async with asyncio.timeout(60):
        with pytest.raises(BusError, match="the ledger is damaged"):
            await read_batch(ReplayReader(bus, "a"), 1, on_wait=Heard().append)
