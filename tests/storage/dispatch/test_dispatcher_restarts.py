"""What the dispatcher knows after crashes, of learners that were replaced, on a bus that lost its disk."""

import asyncio
from contextlib import closing

import pytest
from structlog.testing import capture_logs

from bus.codec import encode
from bus.connection.roles import hold_role
from bus.errors import BusError, FencedError, LostDataError, StorageError
from bus.messages import Prompt
from bus.requests import IssuedRequest, Unsettled, UnsettledRequest, Waiting
from bus.streams.consume import Inbox
from bus.streams.publish import Publisher
from bus.topology import ensure
from storage.dispatch.leases import LeasePublication
from storage.ledger.ledger import Ledger
from storage.prompts.data_sets import DataSets
from storage.shard.ingest_checks import LedgerFacts
from tests.factories import make_lease
from tests.storage.dispatch.lease_states import rolled_out, stored
from tests.storage.ledger.ledgers import on_disk
from tests.storage.serving import (
    SHARDS,
    LearnerStandIn,
    has,
    leases,
    manifest,
    messages,
    opened,
    refusing_disk,
    running,
    send_groups,
    send_rejections,
    serving,
    until,
)

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


async def test_resumed_learner_gets_the_later_groups_again(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.resume(0)
        for step in (1, 2, 3):
            await learner.publish(step - 1)
            await until(lambda step=step: storage.ledger.next_id == 2 + 2 * step)
            await rolled_out(bus, storage)
            await learner.batch(step)
        await learner.commit(1)
        second = LearnerStandIn(bus, "b")
        await second.resume(1)
        assert storage.ledger.account().trained == 2
        assert storage.ledger.account().balanced()
        await second.publish(1)
        await until(lambda: storage.dispatcher.policy == manifest(1, incarnation="b"))
        assert storage.dispatcher.room() == 0  # the two steps to repeat are ahead of it
        assert await second.batch(2) == [2, 3]
        assert await second.batch(3) == [4, 5]


async def test_a_crash_forgets_no_learner_that_was_told_to_go_on(bus, learner, tmp_path, monkeypatch):
    async with serving(bus, tmp_path) as storage:
        await learner.resume(0)
        await learner.publish(0)
        await until(lambda: storage.ledger.next_id == 4)
        await rolled_out(bus, storage)
        await learner.batch(1)
        monkeypatch.setattr(storage.dispatcher, "_wake", lambda: None)  # what it does next flushes, too
        await LearnerStandIn(bus, "b").resume(0)
        with closing(
            Ledger.open(on_disk(tmp_path / "ledger.sqlite", tmp_path / "crashed.sqlite"))
        ) as crashed:
            assert (crashed.facts["incarnation"], crashed.account().trained) == ("b", 0)


async def test_learner_that_was_replaced_is_refused(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.resume(0)
        await LearnerStandIn(bus, "b").resume(0)
        with pytest.raises(FencedError, match="learner a was replaced by b"):
            await learner.ask(1)
        with pytest.raises(FencedError, match="learner a was replaced by b"):
            await learner.commit(1)
    with opened(bus, tmp_path) as storage:
        assert storage.ledger.facts["incarnation"] == "b"  # also after a restart


async def test_request_of_a_replaced_learner_that_is_still_waiting_takes_nothing(
    bus, learner, tmp_path, monkeypatch
):
    monkeypatch.setattr("storage.dispatch.dispatcher.LONG_POLL_S", 60.0)
    async with serving(bus, tmp_path) as storage:
        await learner.resume(0)
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        asking = asyncio.create_task(learner.ask(1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):  # it hangs, as it should
                await asyncio.shield(asking)
        await LearnerStandIn(bus, "b").resume(0)
        with pytest.raises(FencedError, match="was replaced by b"):
            await asking
        await rolled_out(bus, storage)
        assert storage.ledger.steps == {}


async def test_suspended_learner_cannot_take_the_run_back_from_its_successor(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await rolled_out(bus, storage)
        async with hold_role(bus, "learner", "b"):
            second = LearnerStandIn(bus, "b")
            await second.resume(0)
            assert await second.batch(1) == [0, 1]
            with pytest.raises(FencedError, match="learner a was replaced by b"):
                await learner.resume(0)
            assert storage.ledger.account().trained == 2


async def test_policy_of_the_learner_before_does_not_come_back(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.resume(0)
        await learner.publish(3)  # under the key, where each poll finds it
        await until(lambda: storage.dispatcher.policy == manifest(3))
        second = LearnerStandIn(bus, "b")
        await second.resume(0)
        assert storage.dispatcher.policy is None
        assert storage.dispatcher.room() == 0
        answer = manifest(1, incarnation="b")
        await bus.notify(bus.subject("notice", "policy"), answer)
        await until(lambda: storage.dispatcher.policy == answer)
        await learner.publish(4)  # a last word of the old one, as a notice and under the key
        assert isinstance(await second.ask(1), Waiting)  # several polls later
        assert storage.dispatcher.policy == answer


async def test_late_poll_does_not_take_back_a_younger_version(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(1)
        await until(lambda: storage.dispatcher.policy == manifest(1))
        await bus.notify(bus.subject("notice", "policy"), manifest(2))
        await until(lambda: storage.dispatcher.policy == manifest(2))
        await learner.ask(1)  # several polls later
        assert storage.dispatcher.policy == manifest(2)


async def test_restarted_dispatcher_goes_on_where_it_was(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send_groups(bus, [0, 1, 2])
        await stored(storage, 3)  # each shard has its own pace
        assert await learner.batch(1) == [0, 1]
        await stored(storage, 1)
        account = storage.ledger.account()
    async with serving(bus, tmp_path) as storage:
        await until(lambda: storage.dispatcher.policy is not None)
        await stored(storage, 1)
        assert storage.ledger.account() == account
        assert await learner.batch(1) == [0, 1]
        assert storage.dispatcher.room() == 0
        await learner.publish(1)
        await has(bus, "TASKS", 6)
    assert [lease.lease_id for lease in await leases(bus)] == list(range(6))


async def test_crash_at_any_moment_issues_no_lease_twice(bus, learner, tmp_path, monkeypatch):
    """Its ledger is what the disk held at that moment; the bus has forgotten what it saw."""
    await bus.js.update_stream(next(s for s in bus.topology.streams(2) if "TASKS" in s.name).evolve(
        duplicate_window=0.1
    ))  # fmt: skip
    async with serving(bus, tmp_path / "first"):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        crashed = tmp_path / "second"
        crashed.mkdir()
        ledger = crashed / "ledger.sqlite"

        async def published() -> bool:
            on_disk(tmp_path / "first" / "ledger.sqlite", ledger)
            with closing(Ledger.open(ledger)) as copy:
                return copy.facts.get("published_through") == "3"

        await until(published)
    await asyncio.sleep(0.2)  # the window in which the bus itself would have noticed
    async with serving(bus, crashed) as storage:
        await learner.ask(1)
        assert storage.ledger.next_id == 4
    assert [lease.lease_id for lease in await leases(bus)] == [0, 1, 2, 3]


async def test_leases_that_a_crash_left_unpublished_are_published(bus, learner, tmp_path):
    with opened(bus, tmp_path) as storage:
        storage.ledger.issue(3, policy_version=0)
        storage.ledger.set_fact("published_through", "0")
    await bus.js.publish(bus.subject("tasks", "rollout", 0), encode(make_lease(0)))  # somebody rolls it out
    async with serving(bus, tmp_path):
        await has(bus, "TASKS", 3)
        await learner.publish(0)
        await has(bus, "TASKS", 4)
    assert sorted(lease.lease_id for lease in await leases(bus)) == [0, 1, 2, 3]


async def test_leases_are_on_the_disk_before_they_are_published_and_again_once_they_are(
    bus, learner, tmp_path, monkeypatch
):
    """What a crash at either moment leaves: no lease that an actor has is issued twice or forgotten."""
    before: list[tuple[int, int]] = []
    publish = Publisher.publish

    async def looking(self: Publisher, subject: str, data: bytes, **options: str) -> None:
        copy = tmp_path / f"{len(before)}.sqlite"
        on_disk(tmp_path / "ledger.sqlite", copy)
        with closing(Ledger.open(copy)) as found:
            before.append((found.next_id, int(found.facts.get("published_through", "-1"))))
        await publish(self, subject, data, **options)

    monkeypatch.setattr(Publisher, "publish", looking)
    async with serving(bus, tmp_path):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send_rejections(bus, [1])
        await has(bus, "TASKS", 5)
    assert before == [(4, -1)] * 4 + [(5, 3)]


async def test_published_leases_are_on_the_disk_as_published(bus, tmp_path):
    """The bus recognises the second copy of a lease for two minutes only."""
    await ensure(bus.js, bus.topology, SHARDS)
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as ledger:
        data = DataSets(ledger, tmp_path)
        data.configure([Prompt(content="one")], seed=0, shuffle=False, source="the test")
        publication = LeasePublication(bus, LedgerFacts(ledger, asyncio.Event().wait), data, samples=2)
        issued = ledger.issue(3, 0)
        ledger.flush()
        await publication.publish(issued)
        left = on_disk(tmp_path / "ledger.sqlite", tmp_path / "crashed.sqlite")
        with closing(Ledger.open(left)) as crashed:
            assert crashed.facts["published_through"] == "2"


async def test_bus_that_lost_its_disk_gets_all_that_is_rolling_out_again(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send_groups(bus, [0, 2])
        await stored(storage, 2)
        await send_rejections(bus, [1])
        await has(bus, "TASKS", 5)
    await bus.js.delete_stream(bus.topology.stream("TASKS"))
    assert await ensure(bus.js, bus.topology, SHARDS) == {"TASKS"}
    async with serving(bus, tmp_path, reissue=True):
        await has(bus, "TASKS", 2)
    assert [lease.lease_id for lease in await leases(bus)] == [3, 4]


async def test_leases_that_vanished_from_the_bus_are_published_again_while_others_roll_out(
    bus, learner, tmp_path
):
    """A server may lose what it acknowledged, and an actor's message may be one that nobody understands."""
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        tasks, inbox = bus.topology.stream("TASKS"), Inbox(bus, "TASKS", "rollout")
        [held] = await inbox.take(1, 20.0)  # somebody works on it
        for sequence in (2, 3):
            await bus.js.delete_msg(tasks, sequence)
        await has(bus, "TASKS", 4)
        assert sorted([lease.lease_id for lease in await leases(bus)]) == [0, 1, 2, 3]
        await send_groups(bus, [0])
        await held.ack()
        await stored(storage, 1)
        await bus.js.purge_stream(tasks)
        await has(bus, "TASKS", 3)
        assert sorted([lease.lease_id for lease in await leases(bus)]) == [1, 2, 3]
        assert all(lease.republished for lease in await leases(bus))
        assert isinstance(await learner.ask(1), Waiting)  # several polls later
        assert await messages(bus, "TASKS") == 3
        await rolled_out(bus, storage)
        assert await learner.batch(1) == [0, 1]
        assert storage.ledger.account().balanced()


async def test_leases_are_not_lost_while_their_trajectories_or_rejections_wait_to_be_read(
    bus, learner, tmp_path
):
    async with serving(bus, tmp_path):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
    await bus.js.purge_stream(bus.topology.stream("TASKS"))
    await send_groups(bus, [1])
    inbox = Inbox(bus, "TRAJECTORIES-1", "shard-1")
    [held] = await inbox.take(1, 20.0)  # so that the shard does not get it yet
    async with serving(bus, tmp_path):
        assert isinstance(await learner.ask(1), Waiting)  # several polls later
        assert await messages(bus, "TASKS") == 0
        await held.nak()
        await has(bus, "TASKS", 3)
    assert sorted([lease.lease_id for lease in await leases(bus)]) == [0, 2, 3]


async def test_groups_completed_while_the_dispatcher_was_down_are_found(bus, learner, tmp_path):
    async with serving(bus, tmp_path):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
    with opened(bus, tmp_path) as storage:
        async with running(storage.shards[0].run):
            await send_groups(bus, [0, 2])
            await until(lambda: storage.stores[0].completed == [0, 2])
        async with running(lambda stop: storage.run(stop, reissue=False)):
            assert await learner.batch(1) == [0, 2]


async def test_dispatcher_survives_an_outage_of_the_bus(server, bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await server.kill()
        await server.start()
        await until(lambda: bus.client.is_connected)
        await rolled_out(bus, storage)
        assert await learner.batch(1) == [0, 1]


async def test_replay_that_lost_groups_stops_the_dispatcher(bus, tmp_path):
    with opened(bus, tmp_path) as storage:
        storage.ledger.set_fact("shard_1", "5")
        async with running(storage.shards[1].run):
            with pytest.raises(ExceptionGroup) as failure:
                await storage.dispatcher.run(asyncio.Event(), reissue=False)
    assert failure.group_contains(LostDataError, match="shard 1 holds 0 complete groups, .* has seen 5")


async def test_disk_that_refuses_stops_the_dispatcher(bus, learner, tmp_path):
    with opened(bus, tmp_path) as storage:
        task = asyncio.create_task(storage.run(asyncio.Event(), reissue=False))
        await learner.ask(1)
        with capture_logs(), refusing_disk():  # what is logged may go to a file too
            storage.ledger.issue(1, policy_version=0)
            with pytest.raises(BusError, match="ledger cannot be written"):
                await learner.commit(0)
            with pytest.raises(ExceptionGroup) as failure:
                await task
        assert failure.group_contains(StorageError, match="ledger cannot be written")


async def test_a_shard_hears_of_issued_leases_only_when_a_crash_cannot_undo_them(
    bus, learner, tmp_path, monkeypatch
):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        look_at_policy = storage.dispatcher.look_at_policy

        async def hears_of_a_version():  # this very request does, and nothing else that would flush
            monkeypatch.setattr(storage.dispatcher, "look_at_policy", look_at_policy)
            storage.ledger.issue(3, 0)

        monkeypatch.setattr(storage.dispatcher, "look_at_policy", hears_of_a_version)
        [known] = await storage.dispatcher._on_issued(IssuedRequest(shard=0))  # without a turn of the loop
        left = on_disk(tmp_path / "ledger.sqlite", tmp_path / "crashed.sqlite")
        with closing(Ledger.open(left)) as crashed:
            assert crashed.next_id == known.next_id == 7
        storage.ledger.issue(1, 0)
        subject = bus.subject("rpc", "unsettled")
        kept = await bus.request(subject, UnsettledRequest(shard=0), Unsettled, timeout_s=20.0)
        left = on_disk(tmp_path / "ledger.sqlite", tmp_path / "later.sqlite")
        with closing(Ledger.open(left)) as crashed:  # a shard drops what is not among them
            assert crashed.next_id == kept.next_id == 8
