"""What anybody may ask the dispatcher about the steps of a run, and read of its groups."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from bus.errors import UnreadableGroupsError
from bus.images import ImageCount, PlacedImage, image_digest
from bus.requests import GroupRef
from storage.client.reader import ReplayReader
from storage.dispatch.dispatcher import Counting
from tests.factories import make_trajectory
from tests.storage.serving import LearnerStandIn, Storage, has, send, send_groups, serving, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


async def start_run(bus, storage: Storage) -> LearnerStandIn:
    learner = LearnerStandIn(bus)
    await learner.resume(0)
    await learner.publish(0)
    await has(bus, "TASKS", 4)
    await send_groups(bus, range(4))
    await until(lambda: len(storage.ledger.stored) == 4)
    return learner


async def test_groups_of_a_step_are_told_once_it_was_given_them_and_asking_changes_nothing(bus, tmp_path):
    async with serving(bus, tmp_path) as storage:
        learner, reader = await start_run(bus, storage), ReplayReader(bus, "onlooker")
        assert (await reader.given(1)).groups == ()
        await learner.batch(1)
        before = storage.ledger.account(), dict(storage.ledger.facts)
        found = await reader.given(1)
        assert found.groups == tuple(GroupRef(lease_id=n, shard=n, tokens=16) for n in range(2))
        assert (found.incarnation, found.trained_through, found.stage) == ("a", 0, "rl")
        bodies = await reader.fetch(found.groups)
        assert [[t.trajectory_id for t in group] for group in bodies] == [
            ["g00000000.0", "g00000000.1"],
            ["g00000001.0", "g00000001.1"],
        ]
        assert (storage.ledger.account(), storage.ledger.facts) == before


async def given_before_and_after_a_restart(bus, tmp_path, counting, *siblings):
    """What storage gives the first step of a group of these siblings and of two others, and again when it was
    started anew."""
    async with serving(bus, tmp_path, counting=counting) as storage:
        learner = LearnerStandIn(bus)
        await learner.resume(0)
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send(bus, *siblings)
        await send_groups(bus, range(1, 3))
        await until(lambda: len(storage.ledger.stored) == 3)
        given = (await learner.ask(1)).groups
    async with serving(bus, tmp_path, counting=counting):
        assert (await ReplayReader(bus, "onlooker").given(1)).groups == given
    return given


async def test_where_the_learner_shares_prefixes_storage_counts_what_it_computes_also_after_a_restart(
    bus, tmp_path
):
    prompt = np.arange(40, dtype=np.int32)
    first, second, failed = (make_trajectory(0, n, tokens=45, group_size=3) for n in range(3))
    for n, sibling in enumerate((first, second)):
        object.__setattr__(sibling, "token_ids", np.append(prompt, np.arange(5, dtype=np.int32) + n))
    failed = replace(failed, end="environment_error")
    given = await given_before_and_after_a_restart(
        bus, tmp_path, Counting(computed_tokens=True), first, second, failed
    )
    assert (given[0].tokens, given[0].computed_tokens) == (90, 40 + 2 * 5)  # nothing of what is not trained
    assert given[1].tokens == given[1].computed_tokens == 16  # of random texts


async def test_where_the_learner_balances_by_work_storage_counts_images_once_also_after_a_restart(
    bus, tmp_path
):
    one, other = (PlacedImage(image_digest(data), 1, 2, 3, data) for data in (b"one", b"other"))
    siblings = [make_trajectory(0, n, tokens=30, group_size=3) for n in range(3)]
    shown = [(one,), (one, other.moved(8)), (other.moved(20)._replace(rows=1),)]
    first, second, failed = (
        replace(sibling, images=images, loss_mask=np.arange(30) > 26)
        for sibling, images in zip(siblings, shown, strict=True)
    )
    failed = replace(failed, end="environment_error")
    given = await given_before_and_after_a_restart(
        bus, tmp_path, Counting(images=True), first, second, failed
    )
    assert [group.images for group in given] == [ImageCount(2, 6 + 6), ImageCount(0, 0)]


async def test_steps_are_looked_up_in_the_thread_that_changes_them(bus, tmp_path, monkeypatch):
    """In another one they could be on their way from memory to the disk, or back, and be found in neither."""
    async with serving(bus, tmp_path) as storage:
        learner, reader = await start_run(bus, storage), ReplayReader(bus, "onlooker")
        await learner.batch(1)
        asked: list[threading.Thread] = []
        uses = storage.ledger.uses
        monkeypatch.setattr(
            storage.ledger, "uses", lambda step: [asked.append(threading.current_thread()), uses(step)][1]
        )
        assert len((await reader.given(1)).groups) == 2
        assert asked == [threading.current_thread()]


async def test_a_step_that_was_rolled_back_is_no_longer_given_and_the_learner_is_another(bus, tmp_path):
    async with serving(bus, tmp_path) as storage:
        learner, reader = await start_run(bus, storage), ReplayReader(bus, "onlooker")
        await learner.batch(1)
        await learner.publish(1)
        await until(lambda: storage.dispatcher.policy.policy_version == 1)
        assert (await reader.given(1)).trained_through == 1
        await LearnerStandIn(bus, "b").resume(0)
        found = await reader.given(1)
        assert (found.groups, found.incarnation, found.trained_through) == ((), "b", -1)


async def test_a_group_that_was_retired_is_refused_at_once(bus, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await start_run(bus, storage)
        for entry in storage.stores[1].entries:
            storage.stores[1].retire(entry, None)
        async with asyncio.timeout(60):
            with pytest.raises(UnreadableGroupsError, match="was retired"):
                await ReplayReader(bus, "onlooker").fetch([GroupRef(lease_id=3, shard=1)])
