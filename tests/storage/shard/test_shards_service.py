"""Shards away from the dispatcher: whose they are, what they believe, and what is refused."""

import asyncio
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from bus.errors import BusError, ConfigError, FencedError
from bus.messages import RoleHolder, Status
from bus.requests import FullGroups, FullGroupsRequest, Located, LocateRequest
from bus.trajectory import Trajectory
from storage.client.reader import ReplayReader
from storage.settings.replay import ReplayConfig, shard_numbers
from storage.shard.ingest_checks import RUN_ID, VOCABULARY
from storage.shard.service import run_shards
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory
from tests.storage.serving import (
    LearnerStandIn,
    dead_letters,
    has,
    make_shard,
    manifest,
    messages,
    read_batch,
    running,
    send,
    send_groups,
    until,
)
from tests.storage.shard.served_shards import dispatching, keeping, opened, settings

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick", "quick_roles")]


async def serves(bus, shard: int) -> bool:
    request = LocateRequest(lease_ids=(), host="")
    try:
        await bus.request(bus.subject("rpc", "locate", shard), request, Located, timeout_s=20)
    except BusError:
        return False
    return True


async def batch(bus, step: int) -> list[list[str]]:
    found = await read_batch(ReplayReader(bus, "a"), step)
    return [[t.trajectory_id for t in group] for group in found]


async def test_shards_of_two_hosts_make_one_run(bus, tmp_path, connect):
    heard: list[Status] = []
    await bus.listen(bus.subject("status", "shards"), Status, heard.append)
    async with connect("a") as a, connect("b") as b, dispatching(bus, tmp_path) as dispatcher:
        await LearnerStandIn(bus).publish(0)
        async with keeping(a, tmp_path / "a", 0), keeping(b, tmp_path / "b", 1):
            await has(bus, "TASKS", 4)
            await send_groups(bus, range(4))
            await until(lambda: len(dispatcher.ledger.stored) == 4)  # each shard has its own pace
            assert await batch(bus, 1) == [["g00000000.0", "g00000000.1"], ["g00000001.0", "g00000001.1"]]
            assert await batch(bus, 2) == [["g00000002.0", "g00000002.1"], ["g00000003.0", "g00000003.1"]]
        assert dispatcher.ledger.account().trained == 4
    stored = {"shards-0": 4, "shards-1": 4}
    await until(lambda: {status.source: status.values["trajectories_stored"] for status in heard} == stored)
    assert heard[-1].doing.startswith("keeping shards ")


async def test_shards_are_ready_once_they_answer(bus, tmp_path, monkeypatch):
    serve = bus.serve

    async def slowly(*given):
        await asyncio.sleep(0.01)
        return await serve(*given)

    async with dispatching(bus, tmp_path):
        monkeypatch.setattr(bus, "serve", slowly)
        with capture_logs() as said:
            async with keeping(bus, tmp_path, 0, 1):
                await until(lambda: any(line["event"] == "shards_ready" for line in said))
                for shard in (0, 1):
                    asked, subject = FullGroupsRequest(lease_ids=()), bus.subject("rpc", "full_groups", shard)
                    await bus.request(subject, asked, FullGroups, timeout_s=20)


async def test_no_lease_is_issued_before_every_shard_said_what_it_holds(bus, tmp_path):
    async with dispatching(bus, tmp_path) as dispatcher:
        await LearnerStandIn(bus).publish(0)
        async with keeping(bus, tmp_path, 0):
            await until(lambda: dispatcher.awaited_shards == [1])
            await until(lambda: dispatcher.room() == 4)
            assert await messages(bus, "TASKS") == 0
            async with keeping(bus, tmp_path, 1):
                await has(bus, "TASKS", 4)
            await until(lambda: dispatcher.silent_shards == {1})


async def test_second_writer_of_a_shard_is_refused(bus, tmp_path, connect):
    async with dispatching(bus, tmp_path), keeping(bus, tmp_path / "a", 0, 1):
        await until(lambda: serves(bus, 1))
        async with connect("second") as second:
            with pytest.raises(ExceptionGroup) as failure:
                await run_shards(second, settings(tmp_path / "b", 1), asyncio.Event())
    assert failure.group_contains(ConfigError, match="run 'test' already has a shard-1: process")


async def test_writer_whose_shard_was_taken_over_stops_at_once(bus, tmp_path):
    async with dispatching(bus, tmp_path):
        shard = asyncio.create_task(run_shards(bus, settings(tmp_path, 1), asyncio.Event()))
        await until(lambda: serves(bus, 1))
        await bus.put("role.shard-1", RoleHolder(incarnation="other", host="other", pid=1))
        with pytest.raises(ExceptionGroup) as failure:
            await asyncio.wait_for(shard, 20)
    assert failure.group_contains(FencedError, match="another process took over as shard-1")


async def test_lease_is_believed_by_the_ledger_alone(bus, tmp_path):
    async with dispatching(bus, tmp_path) as dispatcher, keeping(bus, tmp_path, 0, 1):
        await LearnerStandIn(bus).publish(0)
        await has(bus, "TASKS", 4)
        await send(bus, *(make_trajectory(4, sample) for sample in range(2)))
        await has(bus, "DEAD", 1)
        [letter] = await dead_letters(bus)
        assert "lease 4 was never issued in this run" in letter.reason
        await send_groups(bus, [0, 1])
        await batch(bus, 1)
        await LearnerStandIn(bus).publish(1)
        await until(lambda: dispatcher.ledger.was_issued(4))
        issued_since = (make_trajectory(4, sample, policy_version=1) for sample in range(2))
        await send(bus, *issued_since)
        await until(lambda: 4 in dispatcher.ledger.stored)


@asynccontextmanager
async def shards_that_know(bus, directory: Path):
    """Shards that heard of leases 0 to 3 of run "ours", of 1000 token ids and newest version 0."""
    async with dispatching(bus, directory) as dispatcher, keeping(bus, directory, 0, 1):
        dispatcher.ledger.set_fact(RUN_ID, "ours")
        dispatcher.ledger.set_fact(VOCABULARY, "1000")
        await LearnerStandIn(bus).publish(0)
        await has(bus, "TASKS", 4)
        await send_groups(bus, [0, 1])
        await until(lambda: set(dispatcher.ledger.stored) == {0, 1})
        yield dispatcher


def poison(kind: str) -> Trajectory:
    one = replace(make_trajectory(2), run="ours", actor="actor-7")
    return {
        "vocabulary": replace(one, token_ids=np.full_like(one.token_ids, 1000)),
        "version": replace(make_trajectory(2, policy_version=6), actor="actor-7"),
        "other run": replace(one, run="theirs"),
        "other names": replace(one, trajectory_id="g00000003.0"),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("vocabulary", "token id 1000, of a vocabulary of 1000"),
        ("version", "a token of version 6, of which 0 is the newest published"),
    ],
)
async def test_poison_is_set_aside_away_from_the_ledger_and_its_lease_refunded(bus, tmp_path, kind, reason):
    async with shards_that_know(bus, tmp_path) as dispatcher:
        await send(bus, poison(kind), make_trajectory(2, 1))
        await until(lambda: dispatcher.ledger.reasons == {"set_aside": 1})
        await has(bus, "DEAD", 1)
        [letter] = await dead_letters(bus)
        assert (letter.kind, letter.actor) == (kind, "actor-7")
        assert reason in letter.reason


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("other run", "it is of run theirs; this one, of the same name, is ours"),
        ("other names", "are not those of lease 2"),
    ],
)
async def test_impostor_is_set_aside_away_from_the_ledger_and_refunds_nothing(bus, tmp_path, kind, reason):
    async with shards_that_know(bus, tmp_path) as dispatcher:
        await send(bus, poison(kind))
        await has(bus, "DEAD", 1)
        [letter] = await dead_letters(bus)
        assert (letter.kind, letter.actor) == ("identity", "actor-7")
        assert reason in letter.reason
        await send_groups(bus, [2])
        await until(lambda: 2 in dispatcher.ledger.stored)
        assert not dispatcher.ledger.reasons


async def test_shard_asks_again_before_it_refuses_by_what_it_heard(bus, tmp_path):
    async with shards_that_know(bus, tmp_path) as dispatcher:
        dispatcher.ledger.set_fact(RUN_ID, "newer")
        dispatcher.ledger.set_fact(VOCABULARY, "1001")
        await bus.put("policy", manifest(1))  # the notice is lost
        of_it = (replace(make_trajectory(2, n, policy_version=1), run="newer") for n in range(2))
        await send(bus, *(replace(t, token_ids=np.full_like(t.token_ids, 1000)) for t in of_it))
        await until(lambda: 2 in dispatcher.ledger.stored)
        assert await messages(bus, "DEAD") == 0


async def test_version_older_than_its_lease_is_noticed_away_from_the_ledger(bus, tmp_path):
    learner = LearnerStandIn(bus)
    async with dispatching(bus, tmp_path) as dispatcher, keeping(bus, tmp_path, 0, 1):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send_groups(bus, [0, 1])
        await learner.batch(1)
        await learner.publish(1)
        await until(lambda: set(dispatcher.ledger.rolling_out) == {2, 3, 4, 5})
        forged = (replace(make_trajectory(4, n, policy_version=0), actor="actor-7") for n in range(2))
        await send(bus, *forged)
        await until(lambda: dispatcher.ledger.reasons == {"set_aside": 1})
        await has(bus, "DEAD", 1)
        [letter] = await dead_letters(bus)
        assert (letter.kind, letter.actor) == ("version", "actor-7")
        assert "a token of version 0, of a lease issued at version 1" in letter.reason
        dispatcher.ledger.lower([5], 0)  # as for a learner that resumed from further back
        await send(bus, *(make_trajectory(5, n, policy_version=0) for n in range(2)))
        await send(bus, *(make_trajectory(2, n, policy_version=0) for n in range(2)))
        await until(lambda: {2, 5} <= set(dispatcher.ledger.stored))


async def test_shard_waits_for_a_dispatcher_that_restarts(bus, tmp_path):
    async with keeping(bus, tmp_path, 0, 1):
        async with dispatching(bus, tmp_path):
            await LearnerStandIn(bus).publish(0)
            await has(bus, "TASKS", 4)
        await send_groups(bus, [0, 1])  # it never heard of them
        async with dispatching(bus, tmp_path) as dispatcher:
            await until(lambda: sorted(dispatcher.ledger.stored) == [0, 1])


async def test_dispatcher_that_stays_away_ends_a_shard_with_the_reason(bus, tmp_path, monkeypatch):
    monkeypatch.setattr(bus, "patience_s", 0.1)
    with pytest.raises(ExceptionGroup) as failure:
        await run_shards(bus, settings(tmp_path, 0), asyncio.Event())
    assert failure.group_contains(BusError, match=r"nobody serves sluice\.test\.rpc\.issued")


async def test_directory_of_another_run_is_refused_by_the_shard(bus, tmp_path):
    with closing(ReplayStore.open(settings(tmp_path).run.replay(1))) as store:
        store.append([make_trajectory(5, sample) for sample in range(2)])
    async with dispatching(bus, tmp_path):
        with pytest.raises(ExceptionGroup) as failure:
            await run_shards(bus, settings(tmp_path, 1), asyncio.Event())
    reason = "holds the group of lease 5, but the ledger has issued only 0"
    assert failure.group_contains(ConfigError, match=reason)


async def test_directory_that_lacks_what_the_ledger_has_seen_is_refused_by_the_shard(bus, tmp_path):
    async with dispatching(bus, tmp_path) as dispatcher:
        async with keeping(bus, tmp_path / "right", 0, 1):
            await LearnerStandIn(bus).publish(0)
            await has(bus, "TASKS", 4)
            await send_groups(bus, [1])
            await until(lambda: 1 in dispatcher.ledger.stored)
        with pytest.raises(ExceptionGroup) as failure:
            await run_shards(bus, settings(tmp_path / "wrong", 1), asyncio.Event())
        reason = "holds 0 complete groups, but the ledger has seen 1 in shard 1: give the --directory"
        assert failure.group_contains(ConfigError, match=reason)


async def test_dispatcher_refuses_a_shard_of_another_run_by_its_answer(bus, tmp_path):
    with closing(ReplayStore.open(tmp_path / "other")) as store:
        store.append([make_trajectory(6, sample) for sample in range(2)])
        async with running(make_shard(bus, store, 0).run), asyncio.timeout(60):
            with opened(bus, tmp_path) as dispatcher, pytest.raises(ExceptionGroup) as failure:
                await dispatcher.run(asyncio.Event(), reissue=False)
    reason = "shard 0 holds the group of lease 6, but the ledger has issued only 0"
    assert failure.group_contains(ConfigError, match=reason)


async def test_shard_that_the_run_does_not_have_is_refused(bus, tmp_path):
    with pytest.raises(ConfigError, match=r"has no shard 2: replay\.shards is 2, so there are 0 to 1"):
        await run_shards(bus, settings(tmp_path, 0, 2), asyncio.Event())


@pytest.mark.parametrize(
    ("text", "numbers"), [("2", (2,)), ("0-3", (0, 1, 2, 3)), ("5,0-1", (0, 1, 5)), ("1,1", (1,))]
)
def test_shards_are_named_by_numbers_and_ranges(text: str, numbers: tuple[int, ...]):
    assert shard_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "-1", "3-1", "1,", "99999"])
def test_text_that_names_no_shards_is_refused(text: str):
    with pytest.raises(ConfigError, match="names no shards: write 2, or 0-3"):
        shard_numbers(text)


def test_storage_keeps_all_shards_none_or_some():
    here = [ReplayConfig(shards=3, here=here).numbers_here for here in ("all", "none", "0,2")]
    assert here == [(0, 1, 2), (), (0, 2)]
    with pytest.raises(ValueError, match="there is no shard 3, shards=3"):
        ReplayConfig(shards=3, here="1-3")
