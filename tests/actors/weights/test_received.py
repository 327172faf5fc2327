"""From the learner's publisher to an engine: deltas, snapshots, and what becomes of wrong ones."""

import asyncio
from dataclasses import replace

import pytest
import torch

from actors.weights import follow as following_policy
from actors.weights.follow import PolicyFollower
from actors.weights.received import Receiver, torch_tensors
from bus.errors import BusError, StorageError
from bus.messages import DeltaRef
from bus.streams.blob_store import put_blob
from bus.streams.publish import Publisher
from learner.config.publication import PublicationConfig
from learner.host_memory.copies import host_tensors
from learner.publication import publisher as publishing
from learner.publication.publisher import WeightPublisher
from storage.settings.weights_transport import FilesTransport, HttpTransport
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import BusBlobs, blob_store
from storage.weights.tensors import Weights
from tests.actors.tiny import other_model, recomputed, request, tiny_model
from tests.actors.weights.received_weights import Recording, damage
from tests.storage.weights.encoded import encode_delta

pytestmark = pytest.mark.nats
TIMEOUT_S = 60


def state(version):
    """`moving` changes a little in every version, `still` never."""
    moving = torch.arange(50_000, dtype=torch.bfloat16)
    moving[version::100] *= 2
    return {"moving": moving, "still": torch.ones(4, 5)}


async def publish(publisher, version, tensors=None):
    tensors = host_tensors(state(version) if tensors is None else tensors)
    await publisher.publish(tensors, policy_version=version, stage="rl", trains_from=0)
    await publisher.snapshots_written()
    return publisher.latest


async def start(bus, directory, incarnation="one", **config):
    publisher = WeightPublisher(
        bus, BusBlobs(bus), PublicationConfig(**{"snapshot_every": 100} | config), incarnation=incarnation
    )
    await publisher.start(directory)
    return publisher


@pytest.fixture
async def publisher(bus, tmp_path):
    return await start(bus, tmp_path)


@pytest.fixture
async def following(bus, monkeypatch):
    """A follower at work, and its engine."""
    monkeypatch.setattr(following_policy, "POLL_S", 0.05)
    monkeypatch.setattr(following_policy, "AGAIN_S", 0.1)
    engine = Recording()
    follower, stop = PolicyFollower(bus, engine), asyncio.Event()
    running = asyncio.create_task(follower.run(stop))
    yield follower, engine
    stop.set()
    async with asyncio.timeout(TIMEOUT_S):
        await running


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Damaging(BusBlobs):
    """A bus that spoils the first delta."""

    def __init__(self, bus, *, flip):
        super().__init__(bus)
        self.flip, self.spoilt = flip, False

    async def put(self, data, *tokens):
        blob = await super().put(data, *tokens)
        if "delta" in tokens and not self.spoilt:
            self.spoilt = True
            await damage(self._bus, blob, flip=self.flip)
        return blob


async def test_engine_gets_all_tensors_first_and_then_those_that_changed(publisher, following):
    follower, engine = following
    async with asyncio.timeout(TIMEOUT_S):
        for version in range(3):
            await publish(publisher, version)
            await follower.at_least(version)
            assert same(engine.state, state(version))
    assert engine.given == [(0, {"moving", "still"}), (1, {"moving"}), (2, {"moving"})]


@pytest.mark.parametrize("transport", ["http", "files"])
async def test_versions_arrive_by_every_transport_and_old_ones_are_removed(
    bus, following, tmp_path, transport
):
    follower, engine = following
    directory = tmp_path / "shared"
    kind = {
        "http": HttpTransport(host="127.0.0.1", serve_from=directory / "test"),
        "files": FilesTransport(directory=directory),
    }[transport]
    store = blob_store(bus, kind, tmp_path)
    publisher = WeightPublisher(bus, store, PublicationConfig(keep=2, snapshot_every=3), incarnation="one")
    await publisher.start(tmp_path)
    async with asyncio.timeout(TIMEOUT_S):
        for version in range(9):
            await publish(publisher, version)
            await follower.at_least(version)
            assert same(engine.state, state(version))
    snapshots = [path.name for path in (directory / "test").glob("*.snapshot.*")]
    assert sorted(name.split(".")[1] for name in snapshots) == ["6"]
    await publisher.close()


async def test_an_embedded_engine_answers_as_the_new_weights_do_after_a_delta(
    bus, publisher, serve, monkeypatch
):
    monkeypatch.setattr(following_policy, "POLL_S", 0.05)
    before, after = tiny_model("qwen3", seed=0), other_model()
    changed = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    some = "model.layers.1.mlp.down_proj.weight"
    changed[some][::2] = after.state_dict()[some][::2]
    async with serve(policy_version=-1) as engine, asyncio.timeout(TIMEOUT_S):
        follower, stop = PolicyFollower(bus, engine), asyncio.Event()
        running = asyncio.create_task(follower.run(stop))
        await publish(publisher, 0, before.state_dict())
        await follower.at_least(0)
        manifest = await publish(publisher, 1, changed)
        await follower.at_least(1)
        assert len(manifest.deltas) == 1
        generation = await engine.generate(request("a", [5, 6, 7]))
        before.load_state_dict(changed)
        expected = recomputed(before, [5, 6, 7], generation)
        assert generation.logprobs == pytest.approx(expected, abs=1e-5)
        assert set(generation.policy_versions) == {1}
        stop.set()
        await running


async def test_versions_come_into_the_memory_of_those_that_nobody_holds(bus, publisher):
    receiver, held, places = Receiver(Blobs(bus)), {}, []
    for version in range(6):
        weights = await receiver.advance(await publish(publisher, version))
        tensors = torch_tensors(weights.tensors)
        assert same(tensors, state(version))
        places.append(tensors["moving"].data_ptr())
        if version == 1:
            held = tensors
        del weights, tensors
    first, second, _, third, *_ = places
    assert places == [first, second, first, third, first, third]
    assert same(held, state(1))
    held = torch_tensors(receiver.weights.tensors)
    await receiver.advance(await publish(publisher, 6))
    assert not any(receiver._spare._idle.values()), "of the memory of two versions it needed that of one"
    assert same(held, state(5))


async def test_versions_in_between_are_skipped_in_one_update_of_the_engine(bus, publisher, following):
    follower, engine = following
    async with asyncio.timeout(TIMEOUT_S):
        engine.taking.clear()
        await publish(publisher, 0)
        while follower._receiver.weights is None:  # noqa: ASYNC110 - the follower has no event for it
            await asyncio.sleep(0.01)
        for version in range(1, 7):
            await publish(publisher, version)
        while follower._newest.fetched.policy_version < 6:  # noqa: ASYNC110 - it has no event for that
            await asyncio.sleep(0.01)
        engine.taking.set()
        await follower.at_least(6)
    assert [version for version, _ in engine.given] == [0, 6]
    assert same(engine.state, state(6))


async def test_a_late_joiner_takes_the_snapshot_and_what_came_after_it(bus, tmp_path):
    publisher = await start(bus, tmp_path, snapshot_every=4)
    for version in range(7):
        manifest = await publish(publisher, version)
    weights = await Receiver(Blobs(bus)).advance(manifest)
    assert (manifest.snapshot_at, weights.policy_version) == (4, 6)
    assert same(torch_tensors(weights.tensors), state(6))


async def test_a_snapshot_takes_no_memory_for_what_is_held_already(bus, publisher, tmp_path):
    receiver = Receiver(Blobs(bus))
    held = await receiver.advance(await publish(publisher, 0))
    successor = await start(bus, tmp_path, incarnation="two")
    manifest = await publish(successor, 1)
    weights = await receiver.advance(manifest)
    assert manifest.deltas == ()
    assert weights.tensors["still"] is held.tensors["still"]
    assert same(torch_tensors(weights.tensors), state(1))


async def test_one_who_is_behind_the_last_snapshot_still_goes_by_deltas(bus, tmp_path):
    publisher = await start(bus, tmp_path, snapshot_every=4)
    receiver = Receiver(Blobs(bus))
    for version in range(3):
        await receiver.advance(await publish(publisher, version))
    for version in range(3, 6):
        manifest = await publish(publisher, version)
    await damage(bus, manifest.snapshot, flip=False)
    weights = await receiver.advance(manifest)
    assert (manifest.snapshot_at, weights.policy_version) == (4, 5)
    assert same(torch_tensors(weights.tensors), state(5))


async def test_a_resumed_learners_weights_reach_the_engine_as_far_as_they_differ(
    bus, publisher, following, tmp_path
):
    follower, engine = following
    async with asyncio.timeout(TIMEOUT_S):
        for version in range(3):
            await publish(publisher, version)
        await follower.at_least(2)
        engine.given.clear()
        successor = await start(bus, tmp_path, incarnation="two")
        await publish(successor, 1)
        while engine.policy_version != 1:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)
    assert engine.given == [(1, {"moving"})]
    assert same(engine.state, state(1))


@pytest.mark.parametrize("flip", [True, False])
async def test_a_damaged_delta_is_refused_and_the_snapshot_taken_instead(bus, tmp_path, flip):
    publisher = await start(bus, tmp_path, snapshot_every=2)
    receiver = Receiver(Blobs(bus))
    await receiver.advance(await publish(publisher, 0))
    await publish(publisher, 1)
    manifest = await publish(publisher, 2)
    await damage(bus, manifest.deltas[1].blob, flip=flip)
    assert manifest.snapshot_at == 2
    assert same(torch_tensors((await receiver.advance(manifest)).tensors), state(2))


@pytest.mark.parametrize("flip", [True, False])
async def test_the_old_version_goes_on_until_the_learner_answers_with_a_snapshot(
    bus, publisher, following, monkeypatch, flip
):
    """The delta is damaged for good, and no snapshot leads around it."""
    follower, engine = following
    monkeypatch.setattr(publishing, "POLL_S", 0.02)
    monkeypatch.setattr(publisher, "_store", Damaging(bus, flip=flip))
    async with asyncio.timeout(TIMEOUT_S):
        await publish(publisher, 0)
        await follower.at_least(0)
        manifest = await publish(publisher, 1)
        while follower._failed[0] != manifest:  # noqa: ASYNC110 - the follower has no event for it
            await asyncio.sleep(0.01)
        assert engine.policy_version == 0
        assert same(engine.state, state(0))
        stop = asyncio.Event()
        serving = asyncio.create_task(publisher.serve(stop))
        await follower.at_least(1)
        assert same(engine.state, state(1))
        await publish(publisher, 2)
        await follower.at_least(2)
        assert same(engine.state, state(2))
        stop.set()
        await serving


async def test_a_damaged_snapshot_is_refused_and_nothing_of_it_is_visible(bus, publisher):
    receiver = Receiver(Blobs(bus))
    manifest = await publish(publisher, 0)
    await damage(bus, manifest.snapshot, flip=True)
    with pytest.raises(BusError, match="do not have the digest"):
        await receiver.advance(manifest)
    assert receiver.weights is None


async def test_a_delta_of_another_base_or_to_another_version_is_refused(bus, publisher):
    receiver = Receiver(Blobs(bus))
    manifest = await publish(publisher, 0)
    held = await receiver.advance(manifest)
    other = Weights.of(0, host_tensors(state(9)))
    wrong_base = encode_delta(other, 1, host_tensors(state(1))).data
    wrong_version = encode_delta(held, 3, host_tensors(state(1))).data
    for data, reason in ((wrong_base, "does not apply"), (wrong_version, "leads to version 3")):
        blob = await put_blob(bus, Publisher(bus), data, "policy", "one", 1)
        ref = DeltaRef(base_version=0, policy_version=1, blob=blob)
        forged = replace(manifest, policy_version=1, snapshot_version=0, deltas=(ref,))
        with pytest.raises(StorageError, match=reason):
            await receiver.advance(forged)
        assert receiver.weights is held
