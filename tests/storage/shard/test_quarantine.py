"""Poison that can be read: set aside with kind, reason and actor, its lease refunded, and the run goes on."""

from collections.abc import Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace

import numpy as np
import pytest

from bus.codec import decode, encode
from bus.messages import GroupRejected
from bus.trajectory import KeptTurn, Trajectory, TrajectoryBatch
from storage.dispatch.admission import Admission
from storage.ledger.ledger import Ledger
from storage.settings.admission import AdmissionConfig
from storage.shard.ingest_checks import NEWEST_VERSION, RUN_ID, VOCABULARY, LedgerFacts, Quarantine
from storage.shard.server import Shard
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory, make_turn
from tests.storage.serving import SHARDS, dead_letters, has, manifest, messages, running, send, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


@pytest.fixture
def ledger(tmp_path) -> Iterator[Ledger]:
    """Ledger of run "ours": leases 0 to 9 of version 3; version 5 is the newest; 1000 token ids."""
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as made:
        made.issue(10, policy_version=3)
        made.set_fact(RUN_ID, "ours")
        made.set_fact(NEWEST_VERSION, "5")
        made.set_fact(VOCABULARY, "1000")
        yield made


@asynccontextmanager
async def shard(bus, ledger: Ledger, tmp_path, look=None):
    """Shard 0 with a quarantine."""

    async def nothing_new() -> None:
        pass

    quarantine = Quarantine(LedgerFacts(ledger, look or nothing_new))
    with closing(ReplayStore.open(tmp_path / "replay")) as store:
        made = Shard(
            bus, store, 0, shards=SHARDS, was_issued=ledger.was_issued, linger_s=0.0, quarantine=quarantine
        )
        async with running(made.run):
            yield store


def group(lease_id: int, version: int = 4) -> list[Trajectory]:
    siblings = (make_trajectory(lease_id, n, policy_version=version) for n in range(2))
    return [replace(t, run="ours", actor="actor-7") for t in siblings]


def with_token(trajectory: Trajectory, token: int) -> Trajectory:
    changed = trajectory.token_ids.copy()
    changed[-1] = token
    return replace(trajectory, token_ids=changed)


async def refused(bus, ledger, tmp_path, poison: Trajectory):
    """Send it as half of its group, then a sound group; its letter and the leases refunded."""
    async with shard(bus, ledger, tmp_path) as store:
        await send(bus, poison, group(0)[1], shard=0)
        await send(bus, *group(2))
        await until(lambda: store.completed == [2])
        await has(bus, "TRAJECTORIES", 0)
        assert store.trajectories == 2
    [letter] = await dead_letters(bus)
    assert letter.actor == "actor-7"
    found = [
        await bus.js.get_msg(bus.topology.stream("OUTCOMES"), n + 1)
        for n in range(await messages(bus, "OUTCOMES"))
    ]
    return letter, [decode(raw.data, GroupRejected) for raw in found]


async def test_token_outside_the_vocabulary(bus, ledger, tmp_path):
    letter, [refund] = await refused(bus, ledger, tmp_path, with_token(group(0)[0], 1000))
    assert letter.kind == "vocabulary"
    assert "g00000000.0: token id 1000, of a vocabulary of 1000" in letter.reason
    assert (refund.lease_id, refund.reason) == (0, "set_aside")


async def test_logprob_that_no_engine_can_report(bus, ledger, tmp_path):
    one = group(0)[0]
    letter, [refund] = await refused(
        bus, ledger, tmp_path, replace(one, behaviour_logprobs=one.behaviour_logprobs + 1)
    )
    assert letter.kind == "logprob"
    assert "but no engine can have drawn a token outside of" in letter.reason
    assert (refund.lease_id, refund.reason) == (0, "set_aside")


async def test_version_that_was_never_published(bus, ledger, tmp_path):
    letter, [refund] = await refused(bus, ledger, tmp_path, group(0, version=6)[0])
    assert letter.kind == "version"
    assert "a token of version 6, of which 5 is the newest published" in letter.reason
    assert refund.lease_id == 0


async def test_version_older_than_its_lease(bus, ledger, tmp_path):
    one = group(0)[0]
    versions = one.policy_versions.copy()
    versions[np.flatnonzero(one.loss_mask)[1]] = 2
    letter, [refund] = await refused(bus, ledger, tmp_path, replace(one, policy_versions=versions))
    assert letter.kind == "version"
    assert "a token of version 2, of a lease issued at version 3" in letter.reason
    assert refund.lease_id == 0


async def test_trajectory_of_an_earlier_run_of_the_same_name_refunds_no_lease_of_this_one(
    bus, ledger, tmp_path
):
    letter, refunds = await refused(bus, ledger, tmp_path, replace(group(0)[0], run="theirs"))
    assert letter.kind == "identity"
    assert "it is of run theirs; this one, of the same name, is ours" in letter.reason
    assert refunds == []


@pytest.mark.parametrize(
    "names", [{"trajectory_id": "g00000002.0"}, {"group_id": "g00000002"}, {"sample": 1}]
)
async def test_names_that_are_not_those_of_the_lease(bus, ledger, tmp_path, names):
    letter, refunds = await refused(bus, ledger, tmp_path, replace(group(0)[0], **names))
    assert letter.kind == "identity"
    assert "are not those of lease 0" in letter.reason
    assert refunds == []


def turn(number: int, **changes: object) -> KeptTurn:
    made = make_turn(0, 1, number, policy_version=4)
    return replace(made, run="ours", actor="actor-7", **changes)


async def send_turn(bus, one: KeptTurn) -> None:
    batch = TrajectoryBatch(trajectories=(), turns=(one,))
    await bus.js.publish(bus.subject("trajectories", 0), encode(batch))


@pytest.mark.first(3, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"token_ids": np.full(4, 1000, np.int32)}, "vocabulary"),
        ({"policy_versions": np.full(4, 2, np.int32)}, "version"),
        ({"policy_versions": np.full(4, 6, np.int32)}, "version"),
        ({"run": "theirs"}, "identity"),
        ({"lease_id": 1}, "misdirected"),
        ({"lease_id": 10}, "not_issued"),
    ],
)
async def test_a_turn_that_must_not_be_kept_is_set_aside_and_refunds_no_lease(
    bus, ledger, tmp_path, changes, kind
):
    async with shard(bus, ledger, tmp_path) as store:
        await send_turn(bus, turn(0))
        await send_turn(bus, replace(turn(1), **changes))
        await send_turn(bus, turn(2))
        await has(bus, "TRAJECTORIES", 0)
        assert [one.number for one in store.turns.of(0)] == [0, 2]
    [letter] = await dead_letters(bus)
    assert (letter.kind, letter.actor) == (kind, "actor-7")
    assert await messages(bus, "OUTCOMES") == 0


async def test_versions_of_a_turn_that_is_not_trained_are_those_of_other_weights(bus, ledger, tmp_path):
    async with shard(bus, ledger, tmp_path) as store:
        await send_turn(bus, turn(0, policy_versions=np.full(4, 99, np.int32), trained=False))
        await has(bus, "TRAJECTORIES", 0)
        assert store.turns.number_of(0) == 1


async def test_letters_are_counted_by_kind_on_the_server(bus, ledger, tmp_path):
    async with shard(bus, ledger, tmp_path):
        await bus.js.publish(bus.subject("trajectories", 0), b"garbage")
        await send(bus, with_token(group(0)[0], 5000))
        await send(bus, with_token(group(2)[0], 5000))
        await has(bus, "DEAD", 3)
    info = await bus.js.stream_info(bus.topology.stream("DEAD"), bus.subject("dead", ">"))
    assert info.state.subjects == {bus.subject("dead", "unreadable"): 1, bus.subject("dead", "vocabulary"): 2}


async def test_version_that_storage_has_not_heard_of_is_looked_up_first(bus, ledger, tmp_path):
    async def look() -> None:
        ledger.set_fact(NEWEST_VERSION, "6")

    async with shard(bus, ledger, tmp_path, look) as store:
        await send(bus, *group(0, version=6))
        await until(lambda: store.completed == [0])


async def test_facts_that_are_not_known_yet_refuse_nothing(bus, tmp_path):
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as empty:
        empty.issue(10, policy_version=0)
        async with shard(bus, empty, tmp_path) as store:
            await send(bus, *(with_token(t, 10**6) for t in group(0, version=99)))
            await until(lambda: store.completed == [0])


def test_newest_version_is_that_of_every_learner_and_outlives_a_restart(tmp_path):
    """Tokens of a dead learner's last version still come when its successor has published an older one."""
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as ledger:
        admission = Admission(ledger, AdmissionConfig(), seed=0)
        admission.on_policy(manifest(9, incarnation="a"))
        admission.resume(3, "b")
        assert not admission.on_policy(manifest(10, incarnation="a"))  # it is fenced, and yet was published
        admission.on_policy(manifest(7, incarnation="b"))
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as ledger:
        assert ledger.facts[NEWEST_VERSION] == "10"
