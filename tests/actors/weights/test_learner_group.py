"""Weights from the learner to engines in a group: real bus, real gloo, a stand-in of the SGLang server."""

import asyncio
import json
import math
import os
import re
import signal
import sys
import threading
from contextlib import asynccontextmanager
from functools import partial

import pytest
import structlog
import torch

from actors.engines.announced_version import Published
from actors.engines.fleet.fleet import Fleet
from actors.engines.sglang.client.weight_labels import weights_label
from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from actors.settings.fleet import FleetConfig
from actors.weights.follow import PolicyFollower
from bus.errors import BusError, ConfigError, EngineError, WeightsKeptError
from bus.messages import BlobRef, PolicyManifest, SnapshotWanted
from learner.config.publication import PublicationConfig
from learner.host_memory.copies import host_tensors
from learner.publication.broadcast import Broadcaster
from learner.publication.publisher import WeightPublisher
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import BusBlobs
from storage.weights.tensors import Weights
from tests.actors import asking_actor, gloo_rank, sglang_stand_in
from tests.actors.sglang_stand_in import StandIn

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
TIMEOUT_S = 60.0
LONG_S = 80.0
"""Limit of a group that no test may wait for; a thread that joins one in vain ends no sooner."""
MORE_THAN_SOCKETS_BUFFER = 1 << 20
"""Rows of 64 bytes."""
BLOB = BlobRef(subject="none", chunks=1, size_bytes=1, digest="0" * 32)


def state(version, rows=4):
    return {
        "large": torch.full((rows, 16), float(version)),
        "half": torch.arange(7, dtype=torch.bfloat16) + version,
        "scalar": torch.tensor(float(version)),
        "last": torch.arange(32.0) - version,
    }


class Learner:
    """What an actor sees of one: weights that are announced, and its broadcaster."""

    def __init__(self, bus, incarnation="one", timeout_s=TIMEOUT_S, together=False):
        self.bus = bus
        self.incarnation = incarnation
        self.weights = None
        self.rows = 4
        self.fetched = []
        """Versions that came by the transport."""
        self.reachable = True
        self.broadcaster = Broadcaster(
            bus, lambda: self.weights, incarnation=incarnation, timeout_s=timeout_s, together=together
        )

    def announce(self, version):
        self.weights = Weights.of(version, host_tensors(state(version, self.rows)))
        return self.manifested(version)

    def manifested(self, version):
        manifest = PolicyManifest(
            policy_version=version, incarnation=self.incarnation, snapshot=BLOB, model=BLOB, stage="rl"
        )
        return Published(self.bus, manifest, self._fetch)

    async def _fetch(self, manifest):
        if not self.reachable:
            raise BusError("the transport is away")
        self.fetched.append(manifest.policy_version)
        return state(manifest.policy_version, self.rows)

    def senders(self):
        return [group.process._process for group in self.broadcaster._groups.values()]

    async def none_is_left(self):
        async with asyncio.timeout(TIMEOUT_S):
            while self.broadcaster._living:  # noqa: ASYNC110 - it has no event for it
                await asyncio.sleep(0.05)


@pytest.fixture
def starting(bus, monkeypatch):
    """Run a learner's broadcaster, which waits for no engine to connect when it ends."""
    monkeypatch.setattr("learner.publication.broadcast.CONNECT_S", 0.0)

    @asynccontextmanager
    async def running(**settings):
        learner = Learner(bus, **settings)
        await learner.broadcaster.start()
        try:
            yield learner
        finally:
            senders = learner.senders()
            await learner.broadcaster.close()
            assert all(sender.returncode is not None for sender in senders)

    return running


@pytest.fixture
async def learner(starting):
    async with starting() as learner:
        yield learner


@pytest.fixture
def serving(tmp_path):
    """An engine attached to a stand-in of its own."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))

    @asynccontextmanager
    async def attached(**settings):
        server = StandIn()
        await server.start()
        config = SglangEngineConfig(
            url=server.url, update="group", weights_directory=tmp_path / "weights", **settings
        )
        engine = SglangEngine(model, config, tmp_path / "unused.log")
        try:
            yield engine, server
        finally:
            await engine.close()
            await server.close()

    return attached


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stops_before_it_sends(sender, published):
    """Told to send, it does not."""
    begin = published.begin

    async def stopped(offer):
        sender.send_signal(signal.SIGSTOP)
        await begin(offer)

    published.begin = stopped


@pytest.mark.slow
async def test_each_version_is_sent_in_one_group_and_labelled(learner, serving):
    async with serving() as (engine, server):
        await engine.start()
        for version in (3, 4):
            await engine.load_published(learner.announce(version))
            assert (engine.policy_version, server.version) == (version, weights_label(version))
            assert same(server.received, state(version))
        assert server.said.count("init_weights_update_group") == 1
        begun = server.said.index("begin_weight_update")
        assert server.said[begun : begun + 3] == [
            "begin_weight_update",
            "update_weights_from_distributed",
            "end_weight_update",
        ]
        assert learner.fetched == []
    await learner.none_is_left()  # the engine said that it left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sessions", "says"), [(True, ["target"] * 2), pytest.param(False, [None], marks=pytest.mark.nightly)]
)
async def test_a_draft_model_of_its_own_gets_nothing_of_what_is_sent(learner, serving, sessions, says):
    async with serving() as (engine, server):
        server.speculation, server.draft, server.update_sessions = "EAGLE", "/draft", sessions
        await engine.start()
        await engine.load_published(learner.announce(3))
        assert same(server.received, state(3))
        assert [body.get("selector") for body in server.updates] == says
        assert not any("disable_draft_model" in body for body in server.updates)


@pytest.mark.nightly
@pytest.mark.slow
async def test_the_memory_of_a_version_that_nobody_needs_any_more_serves_a_later_one(
    learner, serving, monkeypatch
):
    monkeypatch.setattr("learner.publication.shared_copy.BUCKET_BYTES", 128)
    async with serving() as (engine, server):
        await engine.start()

        async def load(version):
            await engine.load_published(learner.announce(version))
            assert same(server.received, state(version))
            return learner.broadcaster._newest

        held = await load(0)  # as for an engine that takes it still
        before = bytes(held.memory.bytes)
        numbers = [held.memory.number, (await load(1)).memory.number]
        assert numbers[0] != numbers[1]
        assert bytes(held.memory.bytes) == before
        del held
        assert (await load(2)).memory.number in numbers
        assert server.said.count("update_weights_from_distributed") == 3 * 2
        assert server.said.count("init_weights_update_group") == 1
    await learner.none_is_left()
    assert not learner.broadcaster._spares


@pytest.mark.nightly
@pytest.mark.slow
async def test_a_later_version_is_sent_where_the_announced_one_is_gone_and_is_not_sent_again(
    learner, serving
):
    async with serving() as (engine, server):
        await engine.start()
        older, newer = learner.announce(3), learner.announce(4)
        await engine.load_published(older)
        assert engine.policy_version == 4
        said = len(server.said)
        assert await engine.load_published(newer) == 0.0
        assert len(server.said) == said


@pytest.mark.slow
@pytest.mark.parametrize(
    "early", [pytest.param(False, marks=pytest.mark.slow), True], ids=["before it answers", "after"]
)
async def test_a_learner_that_is_killed_in_mid_broadcast_has_its_version_fetched(learner, serving, early):
    async with serving() as (engine, server):
        await engine.start()
        await engine.load_published(learner.announce(0))
        server.answers_early = early
        [sender] = learner.senders()
        published = learner.announce(1)
        stops_before_it_sends(sender, published)
        loading = asyncio.create_task(engine.load_published(published))
        async with asyncio.timeout(TIMEOUT_S):
            while server.said.count("update_weights_from_distributed") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        sender.kill()
        await asyncio.wait_for(loading, TIMEOUT_S)
        assert (engine.policy_version, engine.failure, learner.fetched) == (1, "", [1])
        assert server.said[-3:] == ["update_weights_from_tensor", "end_weight_update", "continue_generation"]
        await learner.none_is_left()
        await engine.load_published(learner.announce(2))  # the group is not tried again for a while
        assert (engine.policy_version, learner.fetched) == (2, [1, 2])


@pytest.mark.slow
async def test_a_server_that_waits_for_the_learner_for_too_long_is_given_up(learner, serving, monkeypatch):
    async with serving() as (engine, server):
        await engine.start()
        await engine.load_published(learner.announce(0))
        server.answers_early = True
        monkeypatch.setattr(engine, "_config", engine._config.model_copy(update={"update_timeout_s": 3.0}))
        [sender] = learner.senders()
        published = learner.announce(1)
        stops_before_it_sends(sender, published)
        with pytest.raises(EngineError, match=r"the learner has not sent all .* within [0-3]\S* s"):
            await asyncio.wait_for(engine.load_published(published), TIMEOUT_S)
        assert (engine.policy_version, learner.fetched) == (0, [])


@pytest.mark.slow
async def test_a_server_goes_on_once_it_has_all_that_it_said_it_would_take(learner, serving, monkeypatch):
    """As one with CUDA does, whose next tokens would wait for the weights."""
    monkeypatch.setattr("learner.publication.shared_copy.BUCKET_BYTES", 128)
    async with serving() as (engine, server):
        server.answers_early = True
        await engine.start()
        await engine.load_published(learner.announce(0))
        [sender], said = learner.senders(), len(server.said)
        published = learner.announce(1)
        stops_before_it_sends(sender, published)
        asked, answered = asyncio.Event(), []
        ended = published.ended

        async def asks(*arguments):
            asked.set()
            await ended(*arguments)
            answered.append("that it is sent")

        published.ended = asks
        async with asyncio.timeout(TIMEOUT_S):
            loading = asyncio.create_task(engine.load_published(published))
            await asked.wait()
            assert server.said[said:].count("update_weights_from_distributed") == 2
            with pytest.raises(BusError, match="not announced"):  # an answer that comes after that one's
                await learner.manifested(9).offered("", ranks=1, device="cpu")
            assert not answered
            assert "continue_generation" not in server.said[said:]
            sender.send_signal(signal.SIGCONT)
            await loading
            await asyncio.gather(*server.receiving)
        assert (engine.policy_version, learner.fetched) == (1, [])
        assert same(server.received, state(1))


@pytest.mark.slow
async def test_a_learner_that_is_away_leaves_the_engine_as_it_is(learner, serving):
    async with serving() as (engine, server):
        await engine.start()
        await engine.load_published(learner.announce(0))
        successor = Learner(learner.bus, incarnation="not there yet")
        successor.reachable = False
        said = len(server.said)
        with pytest.raises(WeightsKeptError, match="version 1: the transport is away"):
            await engine.load_published(successor.announce(1))
        assert (engine.policy_version, engine.failure, server.said[said:]) == (0, "", [])
        successor.reachable = True
        await engine.load_published(successor.announce(1))
        assert (engine.policy_version, successor.fetched) == (1, [1])


@pytest.mark.slow
async def test_weights_that_only_the_learner_has_are_not_given_up_and_no_older_ones_are_sent(
    learner, serving, monkeypatch
):
    async with serving() as (engine, server):
        await engine.start()
        monkeypatch.setattr(engine._loading._group, "_not_before_s", math.inf)
        await engine.load_published(learner.announce(0))
        assert learner.fetched == [0]
        await engine.load_weights({}, 1)  # with the smallest of these
        monkeypatch.setattr(engine._loading._group, "_not_before_s", 0.0)
        await engine.load_published(learner.announce(2))
        assert learner.fetched == [0]
        with pytest.raises(EngineError, match="the first weights of an engine must be all of them"):
            await engine.load_weights({}, 3)
        with pytest.raises(EngineError, match="could not take back from here"):
            await engine.release()
        assert (engine.policy_version, server.version, engine.failure) == (2, weights_label(2), "")


async def test_weights_that_do_not_come_in_time_leave_the_engine_as_it_is(learner, serving):
    async with serving(update_timeout_s=2.0) as (engine, server):
        await engine.start()
        successor, never = Learner(learner.bus, incarnation="not there yet"), asyncio.Event()
        published = successor.announce(1)
        published._fetch = lambda _: never.wait()
        said = len(server.said)
        with pytest.raises(WeightsKeptError, match=r"version 1: the transport did not bring them within"):
            await engine.load_published(published)
        assert (engine.policy_version, engine.failure, server.said[said:]) == (-1, "", [])


class SentTo:
    """An engine that the learner could not send the first thing to, nor anybody else."""

    policy_version = -1

    def __init__(self):
        self.asked = []

    async def load_published(self, published):
        self.asked.append(published.policy_version)
        if len(self.asked) == 1:
            raise WeightsKeptError("there was no way")
        self.policy_version = published.policy_version
        return 0.0


async def test_a_version_that_could_not_be_had_is_asked_for_again(bus, monkeypatch):
    monkeypatch.setattr("actors.weights.follow.AGAIN_S", 0.1)
    monkeypatch.setattr("actors.weights.follow.POLL_S", 0.05)
    manifest = PolicyManifest(policy_version=3, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl")
    await bus.put("policy", manifest)
    wanted = asyncio.Queue()
    await bus.listen(bus.subject("notice", "snapshot"), SnapshotWanted, wanted.put_nowait)
    engine, stop = SentTo(), asyncio.Event()
    follower = PolicyFollower(bus, engine, from_learner=True)
    running = asyncio.create_task(follower.run(stop))
    async with asyncio.timeout(TIMEOUT_S):
        await follower.at_least(3)
        assert (await wanted.get()).reason == "there was no way"
        stop.set()
        await running
    assert engine.asked == [3, 3]


@pytest.mark.slow
async def test_ranks_that_do_not_come_cost_the_group_and_nothing_else(starting, serving):
    async with starting(timeout_s=3.0) as learner, serving() as (engine, server):
        server.tensor_ranks = 2  # of which one comes
        await engine.start()
        await asyncio.wait_for(engine.load_published(learner.announce(0)), TIMEOUT_S)
        assert (engine.policy_version, learner.fetched) == (0, [0])
        assert server.said.count("update_weights_from_distributed") == 0
        await learner.none_is_left()


@pytest.mark.nightly
@pytest.mark.slow
async def test_an_engine_that_does_not_take_what_it_asked_for_holds_up_no_other_and_is_given_up(
    learner, serving
):
    learner.rows = MORE_THAN_SOCKETS_BUFFER
    async with serving() as (slow, _), serving() as (quick, server):
        await slow.start()
        await quick.start()
        published = learner.announce(0)
        await published.begin(await slow._loading._group.prepare(published, TIMEOUT_S))
        await quick.load_published(published)
        assert same(server.received, state(0, learner.rows))
        later = learner.announce(1)
        offer = await quick._loading._group.prepare(later, TIMEOUT_S)
        learner.broadcaster._timeout_s = 0.5
        await later.begin(offer)
        async with asyncio.timeout(TIMEOUT_S):
            while offer[0].group in learner.broadcaster._groups:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        with pytest.raises(BusError, match="is not offered to group"):
            await later.begin(offer)


class KilledEngine:
    """An engine whose one rank is a process, which is killed in the end."""

    async def start(self):
        """Start its rank, which takes longer than a group may wait for one."""
        self._rank = await asyncio.create_subprocess_exec(
            sys.executable, gloo_rank.__file__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert await self._line(4 * TIMEOUT_S) == b"up\n"

    async def join(self, published):
        """Ask for a version in a group, and join that."""
        self.offer = await published.offered("", ranks=1, device="cpu")
        [first, *_] = self.offer
        body = {
            "group_name": first.group,
            "master_address": first.host,
            "master_port": first.port,
            "rank_offset": first.first_rank,
            "world_size": first.world_size,
        }
        async with published.in_group(self.offer):
            assert await self._says(body) == b"joined\n"

    async def receive(self, published):
        async with published.in_group(self.offer):
            await published.begin(self.offer)
            for bucket in self.offer:
                body = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
                assert await self._says(body) == b"received\n"
            await published.ended(self.offer, TIMEOUT_S)

    async def die_in_mid_broadcast(self, published):
        """Have the learner send, and take nothing."""
        await published.begin(self.offer)
        await self.die()

    async def die(self):
        self._rank.kill()
        await self._rank.wait()

    async def _says(self, body):
        self._rank.stdin.write(json.dumps(body).encode() + b"\n")
        return await self._line()

    async def _line(self, timeout_s=TIMEOUT_S):
        return await asyncio.wait_for(self._rank.stdout.readline(), timeout_s)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_engine_that_is_killed_in_mid_broadcast_costs_its_group_only(learner):
    learner.rows = MORE_THAN_SOCKETS_BUFFER
    published, engine = learner.announce(0), KilledEngine()
    await engine.start()
    await engine.join(published)
    await engine.die_in_mid_broadcast(published)
    await learner.none_is_left()


@pytest.mark.slow
async def test_one_process_sends_to_all_engines_together_and_goes_on_when_one_of_them_leaves(
    starting, serving
):
    async with starting(together=True) as learner, serving() as (one, first), serving() as (two, second):
        async with serving() as (three, third):
            for engine in (one, two, three):
                await engine.start()
            for version in range(2):
                published = learner.announce(version)
                await asyncio.gather(*(engine.load_published(published) for engine in (one, two, three)))
                for server in (first, second, third):
                    assert same(server.received, state(version))
                    assert server.said.count("init_weights_update_group") == 1
                [sender] = learner.senders()
        published = learner.announce(2)
        await asyncio.gather(one.load_published(published), two.load_published(published))
        assert same(first.received, state(2))
        assert same(second.received, state(2))
        assert [sender] != learner.senders(), "the group of three is given up"
        assert len(learner.senders()) == 1
    assert learner.fetched == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_an_engine_that_dies_leaves_the_others_of_its_group_whole_versions(
    starting, serving, monkeypatch
):
    monkeypatch.setattr("learner.publication.broadcast.ASKING_S", 5.0)  # a loaded machine asks later
    monkeypatch.setattr("actors.engines.sglang.broadcast_group.AGAIN_S", 0.0)
    async with starting(together=True) as learner, serving() as (one, first), serving() as (two, second):
        learner.rows = MORE_THAN_SOCKETS_BUFFER // 2
        three = KilledEngine()

        async def load(version, *threes_part):
            published, said = learner.announce(version), [len(server.said) for server in (first, second)]
            loads = one.load_published(published), two.load_published(published)
            await asyncio.gather(*(part(published) for part in threes_part), *loads)
            for engine, server, before in ((one, first, said[0]), (two, second, said[1])):
                assert (engine.policy_version, engine.failure) == (version, "")
                assert server.version == weights_label(version)
                by_transport = "update_weights_from_tensor" in server.said[before:]
                last = server.weights if by_transport else server.received
                assert same(last, state(version, learner.rows))

        async def takes(published):
            await three.join(published)
            await three.receive(published)

        async def dies(published):
            [first, *_] = three.offer
            three.offer = await published.offered(
                first.group, ranks=1, device="cpu", first_rank=first.first_rank
            )
            assert three.offer[0].group == first.group
            await three.die_in_mid_broadcast(published)

        for engine, server in ((one, first), (two, second)):
            server.joins_within_s = 20.0  # a rank that waits for one which failed itself hears nothing sooner
            await engine.start()
        await three.start()
        await load(0, takes)
        assert first.said.count("init_weights_update_group") == 1
        await load(1, dies)
        assert learner.fetched == [1], "the transport brings what the broadcast did not"
        await load(2)
        assert learner.fetched == [1]
        assert len(learner.senders()) == 1


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "gone by what its actor says"])
async def test_engines_whose_group_lacks_one_that_died_before_it_joined_soon_go_on(
    starting, serving, bus, monkeypatch, is_killed
):
    monkeypatch.setattr("learner.publication.broadcast.ASKING_S", 20.0)  # it ends as soon as both ask
    monkeypatch.setattr(Broadcaster, "_all_ask", lambda self, wanted: len(wanted) == 2)
    monkeypatch.setattr("learner.publication.broadcast.CONNECT_S", 10.0)
    monkeypatch.setattr("learner.publication.broadcast.SILENT_S", 5.0 if is_killed else math.inf)
    may_join, join = threading.Event(), sglang_stand_in.GlooRank
    monkeypatch.setattr(sglang_stand_in, "GlooRank", lambda *given: may_join.wait() and join(*given))
    actor = await asyncio.create_subprocess_exec(
        sys.executable, asking_actor.__file__, str(bus.client.connected_url.geturl()),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        async with starting(together=True, timeout_s=LONG_S) as learner, serving() as (engine, server):
            server.joins_within_s = LONG_S
            await engine.start()
            published = learner.announce(0)
            assert await asyncio.wait_for(actor.stdout.readline(), 2 * TIMEOUT_S) == b"up\n"
            with structlog.testing.capture_logs() as logs:
                actor.stdin.write(b"\n")
                loading = asyncio.create_task(engine.load_published(published))
                group = await asyncio.wait_for(actor.stdout.readline(), TIMEOUT_S)
                assert group.startswith(b"sluice-one-")
                if is_killed:
                    actor.kill()
                else:
                    actor.stdin.write(b"\n")
                    async with asyncio.timeout(TIMEOUT_S):
                        while learner.broadcaster._groups:  # noqa: ASYNC110 - it has no event for it
                            await asyncio.sleep(0.05)
                may_join.set()  # where the other is gone by what its actor says, the group is given up by now
                await asyncio.wait_for(loading, TIMEOUT_S)
            assert (engine.policy_version, engine.failure, learner.fetched) == (0, "", [0])
            await learner.none_is_left()
    finally:
        may_join.set()
        if actor.returncode is None:
            actor.kill()
        await actor.communicate()
    [failed] = (log for log in logs if log["event"] == "learners_group_failed")
    assert failed["group"] == group.decode().strip()
    given_up = [log["reason"] for log in logs if log["event"] == "group_given_up"]
    silent = r"the engine of actor-that-dies with ranks from \d on is not heard for 5 s"
    assert [bool(re.fullmatch(silent, reason)) for reason in given_up] == [True] * is_killed


@pytest.mark.slow
async def test_engines_wait_for_one_that_is_not_ready_no_longer_than_is_stated_and_have_received_nothing(
    starting, monkeypatch
):
    monkeypatch.setattr("learner.publication.broadcast.READY_S", 0.2)
    async with starting(together=True) as learner:
        published = learner.announce(0)
        asked = [published.offered("", ranks=ranks, device="cpu") for ranks in (1, 2)]
        asks_too_much = learner.manifested(1).offered("", ranks=1, device="cpu")
        (ready, *_), (late, *_), refusal = await asyncio.gather(*asked, asks_too_much, return_exceptions=True)
        assert str(refusal).endswith("version 1 is not announced by this learner")
        assert (ready.first_rank, late.first_rank, ready.world_size, late.world_size) == (1, 2, 4, 4)
        with pytest.raises(BusError, match=r"1 of 2 engines are ready for version 0 after 0\.2 s"):
            await published.begin([ready])
        await learner.none_is_left()
        with pytest.raises(BusError, match="is not offered to group"):
            await published.begin([late])


@pytest.mark.slow
async def test_a_learner_whose_process_dies_has_another_make_the_next_offer(learner, serving):
    async with serving() as (engine, server):
        await engine.start()
        await engine.load_published(learner.announce(0))
        [sender] = learner.senders()
        later = learner.announce(1)
        sender.send_signal(signal.SIGSTOP)
        asking = asyncio.create_task(engine.load_published(later))
        async with asyncio.timeout(TIMEOUT_S):
            while getattr(learner.broadcaster._newest, "policy_version", 0) == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        sender.kill()
        await asyncio.wait_for(asking, TIMEOUT_S)
        await engine.load_published(learner.announce(2))
        assert same(server.received, state(2))
        assert (engine.policy_version, engine.failure) == (2, "")
        assert sender not in learner.senders()


@pytest.mark.slow
async def test_the_sender_ends_with_its_learner(learner):
    await learner.announce(0).offered("", ranks=1, device="cpu")
    [sender] = learner.senders()
    sender.stdin.close()
    assert await asyncio.wait_for(sender.wait(), TIMEOUT_S) == 0
    await learner.none_is_left()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("are_gone", [False, True])
async def test_weights_that_are_replaced_while_they_are_copied_are_not_sent(learner, monkeypatch, are_gone):
    published, later = learner.announce(0), Weights.of(1, host_tensors(state(1)))

    def replacing(weights, *how, **kinds):
        learner.weights = later  # and from now on the tensors of `weights` may be written into
        if are_gone and weights is not later:
            raise BusError("version 0 is not on rank 1 any more")
        return copy(weights, *how, **kinds)

    copy = Broadcaster._newest_copy.__globals__["SharedCopy"]
    monkeypatch.setattr("learner.publication.broadcast.SharedCopy", replacing)
    offer = await published.offered("", ranks=1, device="cpu")
    assert offer[0].policy_version == 1


async def test_another_learners_weights_are_not_offered(learner):
    learner.announce(3)
    stranger = Learner(learner.bus, incarnation="another")
    with pytest.raises(BusError, match="the weights of learner another are not to be had from this one"):
        await stranger.announce(0).offered("", ranks=1, device="cpu")
    learner.weights = Weights.of(2, host_tensors(state(2)))
    manifest = PolicyManifest(policy_version=3, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl")
    with pytest.raises(BusError, match="version 3 is not announced by this learner"):
        await Published(learner.bus, manifest, learner._fetch).offered("", ranks=1, device="cpu")


async def test_a_server_of_several_replicas_is_refused_at_its_start(serving):
    async with serving() as (engine, server):
        server.replicas = 2
        with pytest.raises(ConfigError, match="this server has 2"):
            await engine.start()


async def test_a_server_that_an_update_would_end_is_refused_at_its_start(serving):
    async with serving() as (engine, server):
        server.speculation, server.update_sessions = "NGRAM", False
        with pytest.raises(ConfigError, match=r"use 0\.5\.21 or later"):
            await engine.start()


@pytest.mark.slow
async def test_a_fleet_follows_a_publisher_whose_tensors_come_in_groups(bus, tmp_path, serving):
    class Cut(Blobs):
        """The transport, which serves when it is let."""

        open = False

        async def get(self, ref):
            if not self.open:
                raise BusError("nothing may come by the transport")
            return await super().get(ref)

    publisher = WeightPublisher(bus, BusBlobs(bus), PublicationConfig(), incarnation="one")
    await publisher.start(tmp_path)
    broadcaster = Broadcaster(bus, publisher.announced, incarnation="one", timeout_s=TIMEOUT_S)
    await broadcaster.start()
    async with serving() as (one, server), serving() as (two, _):
        built = {"one": one, "two": two}
        fleet = Fleet({name: partial(asyncio.sleep, 0, built[name]) for name in built}, FleetConfig())
        await fleet.start()
        blobs, stop = Cut(bus), asyncio.Event()
        follower = PolicyFollower(bus, fleet, blobs, from_learner=True)
        running = asyncio.create_task(follower.run(stop))
        async with asyncio.timeout(2 * TIMEOUT_S):
            for version in range(3):
                if version == 2:
                    await broadcaster.close()  # it offers nothing any more
                    blobs.open = True
                tensors = host_tensors(state(version))
                await publisher.publish(tensors, policy_version=version, stage="rl", trains_from=0)
                await follower.at_least(version)
                assert fleet.policy_version == version
                if version < 2:
                    assert same(server.received, state(version))
        stop.set()
        await asyncio.wait_for(running, TIMEOUT_S)
        await fleet.close()
    assert server.said.count("update_weights_from_tensor") == 1
