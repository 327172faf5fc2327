import asyncio
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from actors.weights.follow import fetch_model_files, fetch_state, obtain_model
from bus.errors import BusAwayError, BusError, ConfigError, FencedError
from bus.messages import PolicyManifest, Probe, RoleHolder, SnapshotWanted
from learner.config.publication import PublicationConfig
from learner.host_memory.copies import host_tensors
from learner.publication import publisher as publishing
from learner.publication import snapshot_writer
from learner.publication.lent_weights import LentWeights
from learner.publication.publisher import WeightPublisher
from learner.publication.rank_tensors import StoredSnapshot
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import BusBlobs
from storage.weights.tensors import Weights, snapshot_content

pytestmark = pytest.mark.nats
TIMEOUT_S = 60


def state(version):
    """Weights of which one in a hundred is another in every version."""
    a = torch.arange(300_000, dtype=torch.float32)
    a[version::100] += 0.5
    return {"a": a, "b": torch.ones(3, 4), "c": torch.tensor(float("nan"))}


def make(bus, *, incarnation="one", **config):
    return WeightPublisher(
        bus, BusBlobs(bus), PublicationConfig(**{"keep": 2} | config), incarnation=incarnation
    )


@pytest.fixture
async def publisher(bus, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")  # which stay away
    publisher = make(bus, snapshot_every=3)
    await publisher.start(tmp_path)
    return publisher


async def publish(publisher, version, stage="rl"):
    tensors = host_tensors(state(version))
    await publisher.publish(tensors, policy_version=version, stage=stage, trains_from=0)
    await publisher.snapshots_written()
    return publisher.latest


async def announced(bus):
    [manifest, _] = await bus.get("policy", PolicyManifest)
    return manifest


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].numpy().tobytes() == other[name].numpy().tobytes() and one[name].dtype == other[name].dtype
        for name in one
    )


async def test_every_version_arrives_bit_equal_whether_it_is_a_snapshot_or_a_delta(bus, publisher):
    for version in range(8):
        await publish(publisher, version)
        manifest = await announced(bus)
        assert manifest.policy_version == version
        assert same(await fetch_state(Blobs(bus), manifest), state(version))


async def test_deltas_lie_between_snapshots_and_lead_from_the_snapshot_before_the_last(bus, publisher):
    snapshots, chains, sizes = [], [], []
    for version in range(8):
        manifest = await publish(publisher, version)
        snapshots.append(manifest.snapshot_at)
        chains.append([delta.base_version for delta in manifest.deltas])
        sizes.append(publisher.figures["weights/wire_bytes"])
    assert snapshots == [0, 0, 0, 3, 3, 3, 6, 6]
    assert chains == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [3, 4, 5], [3, 4, 5, 6]]
    assert sizes[0] > 1_200_000
    assert max(sizes[1:]) < 0.05 * sizes[0]


async def test_a_version_is_announced_before_its_snapshot_is_stored(bus, publisher):
    news = asyncio.Queue()
    await bus.listen(bus.subject("notice", "policy"), PolicyManifest, news.put_nowait)
    for version in range(4):
        await publish(publisher, version)
    async with asyncio.timeout(TIMEOUT_S):
        heard = [await news.get() for _ in range(5)]
    assert [(m.policy_version, m.snapshot_at) for m in heard] == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 3)]


class OtherRanksWithoutTensors:
    """Notes on which thread tensors are named, which takes seconds where there are very many."""

    ranks = 2

    def __init__(self):
        self.threads = set()

    def with_theirs(self, mine, *_):
        self.threads.add(threading.current_thread())
        return mine

    async def encoded(self, *_):
        return []

    async def snapshot(self, *_):
        return StoredSnapshot({}, ())

    async def written(self, _):
        return ()

    async def hold_all(self, blobs):
        return not blobs

    async def begin_snapshot(self, *_):
        """There is nothing to store."""

    retire = end = begin_snapshot


async def test_the_loop_goes_on_while_tensors_are_named_and_laid_out(bus, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    others = OtherRanksWithoutTensors()
    for module in (publishing, snapshot_writer):
        content = partial(OtherRanksWithoutTensors.with_theirs, others)
        monkeypatch.setattr(module, "snapshot_content", lambda w, note=content: snapshot_content(note(w)))
    publisher = WeightPublisher(
        bus, BusBlobs(bus), PublicationConfig(snapshot_every=2), incarnation="one", others=others
    )
    await publisher.start(tmp_path)
    for version in range(3):
        await publish(publisher, version)
    assert publisher.latest.snapshot_at == 2
    assert others.threads
    assert threading.current_thread() not in others.threads


async def test_other_ranks_hash_their_tensors_while_rank_0_hashes_its_own(bus, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    others, asked = OtherRanksWithoutTensors(), threading.Event()
    stored = StoredSnapshot({}, ())
    monkeypatch.setattr(others, "snapshot", lambda *_: asyncio.to_thread(lambda: asked.set() or stored))
    publisher = WeightPublisher(bus, BusBlobs(bus), PublicationConfig(), incarnation="one", others=others)
    digests = publisher._encoder.digests

    def waiting(tensors):
        assert asked.wait(TIMEOUT_S), "other ranks are asked when rank 0 has hashed"
        return digests(tensors)

    monkeypatch.setattr(publisher._encoder, "digests", waiting)
    await publisher.start(tmp_path)
    await publish(publisher, 0)


async def test_the_same_version_again_announces_its_stage_and_sends_nothing(bus, publisher):
    first = await publish(publisher, 0, stage="warmup")
    again = await publish(publisher, 0)
    assert (again.stage, again.snapshot) == ("rl", first.snapshot)
    assert publisher.figures["weights/wire_bytes"] == 0
    assert same(await fetch_state(Blobs(bus), await publish(publisher, 1)), state(1))
    with pytest.raises(ValueError, match="version 1 was published with other weights"):
        await publisher.publish(host_tensors(state(2)), policy_version=1, stage="rl", trains_from=0)


async def test_updates_that_move_nearly_all_bits_are_whole_and_no_delta_of_each_is_made(
    bus, publisher, monkeypatch
):
    made, join = [], publishing.joined_delta
    monkeypatch.setattr(
        publishing, "joined_delta", lambda *given, **most: [made.append(given[1]), join(*given, **most)][1]
    )

    async def published(version, seed):
        tensors = {"a": torch.rand(10_000, generator=torch.Generator().manual_seed(seed))}
        manifest = await publisher.publish(
            host_tensors(tensors), policy_version=version, stage="rl", trains_from=0
        )
        assert same(await fetch_state(Blobs(bus), manifest), tensors)
        return manifest

    for version in range(13):
        assert (await published(version, seed=version)).snapshot_at == version
        assert not publisher.alarm
    assert made == [1, 12]  # and now and then it is seen whether updates have become small
    await published(13, seed=12)
    assert publisher.alarm.startswith("version 13 is to the bit the one before it")
    assert [(await published(version, seed=12)).snapshot_at for version in (22, 23)] == [22, 22]


async def test_a_step_that_changed_no_weight_is_an_alarm_until_one_does(bus, publisher):
    await publish(publisher, 0)
    same_tensors = host_tensors(state(0))
    with capture_logs() as logs:
        for version in (1, 2):
            await publisher.publish(
                same_tensors, policy_version=version, stage="rl", trains_from=0, why_unchanged="all were 0"
            )
            assert publisher.alarm == f"version {version} is to the bit the one before it: all were 0"
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["weights_unchanged"]
    await publish(publisher, 3)
    assert publisher.alarm == ""


async def test_the_probe_is_announced_with_its_version_also_when_a_snapshot_comes_later(bus, publisher):
    probe = Probe(token_ids=((1, 2, 3),), logprobs=((-1.5, -0.25),))
    for version in range(4):  # the last one is announced again, with its snapshot
        await publisher.publish(
            host_tensors(state(version)), policy_version=version, stage="rl", trains_from=0, probe=probe,
            ess_fraction=version / 4,
        )  # fmt: skip
    await publisher.snapshots_written()
    found = await announced(bus)
    assert (found.snapshot_at, found.probe, found.ess_fraction) == (3, probe, 0.75)


async def test_packages_that_engines_must_have_too_are_announced_with_each_version(bus, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    kernels = {"sglang": "0.5.17"}
    made = WeightPublisher(bus, BusBlobs(bus), PublicationConfig(), incarnation="one", kernels=kernels)
    await made.start(tmp_path)
    for version in (0, 1):
        assert (await publish(made, version)).kernels == (await announced(bus)).kernels == kernels


async def test_weights_that_changed_everywhere_are_a_snapshot(bus, publisher):
    await publish(publisher, 0)
    other = {name: torch.rand_like(tensor) for name, tensor in state(0).items()}
    manifest = await publisher.publish(host_tensors(other), policy_version=1, stage="rl", trains_from=0)
    assert (manifest.snapshot_at, manifest.deltas) == (1, ())
    assert same(await fetch_state(Blobs(bus), manifest), other)


async def test_snapshots_alone_are_sent_if_so_configured(bus, tmp_path):
    publisher = make(bus, snapshot_every=1)
    await publisher.start(tmp_path)
    manifests = [await publish(publisher, version) for version in range(3)]
    assert [(m.snapshot_at, m.deltas) for m in manifests] == [(0, ()), (1, ()), (2, ())]


async def test_model_files_travel_without_the_weights(bus, publisher, tmp_path):
    manifest = await publish(publisher, 0)
    directory = await fetch_model_files(bus, manifest.model, tmp_path / "there")
    assert [path.name for path in directory.iterdir()] == ["config.json"]


async def test_old_versions_leave_the_bus_but_pinned_ones_stay_with_all_they_need(bus, publisher):
    manifests = [await publish(publisher, version) for version in (0, 1)]
    publisher.pin(1)
    manifests += [await publish(publisher, version) for version in range(2, 12)]
    for kept in (1, 10, 11):
        assert same(await fetch_state(Blobs(bus), manifests[kept]), state(kept))
    for gone in (2, 5):
        with pytest.raises(BusError, match="not on the bus"):
            await fetch_state(Blobs(bus), manifests[gone])
    publisher.unpin(1)
    await publish(publisher, 12)
    with pytest.raises(BusError, match="not on the bus"):
        await fetch_state(Blobs(bus), manifests[1])


async def test_a_blob_that_cannot_be_deleted_is_deleted_with_the_next_version(bus, publisher, monkeypatch):
    delete, refused = BusBlobs.delete, []

    async def refusing(store, ref):
        if not refused:
            refused.append(ref.subject)
            raise BusError(f"{ref.subject}: cannot delete it from the bus (timeout)")
        await delete(store, ref)

    monkeypatch.setattr(BusBlobs, "delete", refusing)
    with capture_logs() as logs:
        for version in range(8):
            await publish(publisher, version)
    [said] = [entry for entry in logs if entry["event"] == "old_weights_not_deleted"]
    assert said["blob"] == refused[0]
    kept = await bus.js.stream_info("test-WEIGHTS", subjects_filter=f"{refused[0]}.*")
    assert kept.state.subjects is None


async def test_a_version_is_announced_though_the_bus_is_away_for_a_while(bus, publisher, server, monkeypatch):
    monkeypatch.setattr(bus.js, "_timeout", 0.2)
    swap, failed = bus.swap, []

    async def swap_while_away(key, message, revision):
        if not failed:
            await server.kill()
        try:
            return await swap(key, message, revision)
        except BusError as error:
            failed.append(error)
            if len(failed) == 1:
                await server.start()
            raise

    monkeypatch.setattr(bus, "swap", swap_while_away)
    async with asyncio.timeout(TIMEOUT_S):
        await publish(publisher, 0)
    assert failed
    assert (await announced(bus)).policy_version == 0


async def test_a_learner_that_was_replaced_announces_nothing_any_more(bus, publisher, tmp_path):
    await publish(publisher, 0)
    successor = make(bus, incarnation="two")
    await successor.start(tmp_path)
    await publish(successor, 0)
    with pytest.raises(FencedError, match="learner two has announced version 0 of run 'test'"):
        await publish(publisher, 1)
    assert (await announced(bus)).incarnation == "two"


async def test_the_learner_that_has_the_role_goes_on_after_the_bus_was_set_back(bus, publisher):
    first = await publish(publisher, 0)
    await bus.put("policy", replace(first, incarnation="of a backup"))
    await bus.put("role.learner", RoleHolder(incarnation=first.incarnation, host="here", pid=1))
    await publish(publisher, 1)
    assert (await announced(bus)).policy_version == 1
    await bus.delete("policy")
    await publish(publisher, 2)
    assert (await announced(bus)).policy_version == 2


async def test_a_new_learner_begins_with_a_snapshot_and_takes_the_dead_ones_weights_off_the_bus(
    bus, publisher, tmp_path
):
    for version in (6, 7):
        old = await publish(publisher, version)
    successor = make(bus, incarnation="two")
    await successor.start(tmp_path)
    new = await publish(successor, 7)
    assert (new.snapshot_at, new.deltas) == (7, ())
    with pytest.raises(BusError, match="not on the bus"):
        await fetch_state(Blobs(bus), old)
    assert same(await fetch_state(Blobs(bus), new), state(7))


async def test_a_learner_that_dies_while_it_stores_has_announced_nothing_of_it(bus, publisher, tmp_path):
    before = await publish(publisher, 0)
    put, stored = publisher._store.put, asyncio.Event()

    async def dies(data, *tokens):
        await put(data, *tokens)
        stored.set()
        await asyncio.Event().wait()

    publisher._store.put = dies
    dying = asyncio.create_task(publish(publisher, 1))
    async with asyncio.timeout(TIMEOUT_S):
        await stored.wait()
    dying.cancel()
    await asyncio.wait({dying})
    assert await announced(bus) == before
    assert same(await fetch_state(Blobs(bus), before), state(0))
    successor = make(bus, incarnation="two")
    await successor.start(tmp_path)
    await publish(successor, 0)
    assert {m.incarnation for m in [await announced(bus)]} == {"two"}
    info = await bus.js.stream_info(
        bus.topology.stream("WEIGHTS"), subjects_filter=bus.subject("weights", ">")
    )
    assert {name.split(".")[4] for name in info.state.subjects if ".policy." in name} == {"two"}


async def test_weights_that_the_bus_lost_are_published_whole(bus, publisher, tmp_path):
    await publish(publisher, 0)
    await publish(publisher, 1)
    await bus.js.purge_stream(bus.topology.stream("WEIGHTS"))
    manifest = await publish(publisher, 2)
    assert (manifest.snapshot_at, manifest.deltas) == (2, ())
    assert same(await fetch_state(Blobs(bus), manifest), state(2))
    assert await fetch_model_files(bus, manifest.model, tmp_path / "there")


@pytest.fixture
async def served(publisher, monkeypatch):
    """The publisher, listening for wishes."""
    monkeypatch.setattr(publishing, "POLL_S", 0.01)
    monkeypatch.setattr(publishing, "SNAPSHOT_PAUSE_S", 0.01)
    stop = asyncio.Event()
    serving = asyncio.create_task(publisher.serve(stop))
    yield publisher
    stop.set()
    async with asyncio.timeout(TIMEOUT_S):
        await serving


async def wish(bus, incarnation, version, timeout_s=TIMEOUT_S):
    """Ask for a snapshot; the next manifest that is announced."""
    news = asyncio.Queue()
    listening = await bus.listen(bus.subject("notice", "policy"), PolicyManifest, news.put_nowait)
    wanted = SnapshotWanted(incarnation=incarnation, policy_version=version, reason="a test")
    await bus.notify(bus.subject("notice", "snapshot"), wanted)
    try:
        async with asyncio.timeout(timeout_s):
            return await news.get()
    finally:
        await listening.unsubscribe()


async def test_a_snapshot_that_somebody_needs_is_published_between_two_steps(bus, served):
    await publish(served, 0)
    before = await publish(served, 1)
    await bus.js.purge_stream(bus.topology.stream("WEIGHTS"), subject=f"{before.deltas[0].blob.subject}.0")
    manifest = await wish(bus, "one", 1)
    assert (manifest.policy_version, manifest.snapshot_at) == (1, 1)
    assert same(await fetch_state(Blobs(bus), manifest), state(1))
    assert same(await fetch_state(Blobs(bus), await publish(served, 2)), state(2))


async def test_a_snapshot_is_of_the_announced_version_though_a_later_one_could_not_be_stored(
    bus, served, monkeypatch
):
    async def refuse(*_):
        raise BusError("no room")

    await publish(served, 0)
    await publish(served, 1)
    with monkeypatch.context() as full:
        full.setattr(BusBlobs, "put", refuse)
        with pytest.raises(BusError, match="no room"):
            await publish(served, 2)
    manifest = await wish(bus, "one", 1)
    assert (manifest.policy_version, manifest.snapshot_at) == (1, 1)
    assert same(await fetch_state(Blobs(bus), manifest), state(1))
    assert same(await fetch_state(Blobs(bus), await publish(served, 3)), state(3))


async def test_a_snapshot_of_which_nothing_is_gone_is_not_stored_again_at_once(bus, served):
    await publish(served, 0)
    await publish(served, 1)
    assert (await wish(bus, "one", 1)).snapshot_at == 1
    with pytest.raises(TimeoutError):
        await wish(bus, "one", 1, timeout_s=0.3)


def lent(version):
    """Return weights that are lent, and what is called before they change."""
    found = LentWeights(host_tensors(state(version)), {})
    return found.tensors, found.let_change


async def test_lent_weights_are_given_to_who_asks_until_training_changes_them(bus, served, tmp_path):
    whole = make(bus, snapshot_every=1)
    await whole.start(tmp_path)
    tensors, let_change = lent(0)
    await whole.publish(tensors, policy_version=0, stage="rl", trains_from=0)
    let_change()
    assert whole.announced() is None
    before = whole.latest
    await whole._answer(SnapshotWanted(incarnation="one", policy_version=0, reason="a test"))
    await whole.snapshots_written()
    assert whole.latest is before
    tensors, let_change = lent(1)
    manifest = await whole.publish(tensors, policy_version=1, stage="rl", trains_from=0)
    assert same(await fetch_state(Blobs(bus), manifest), state(1))
    assert not whole.alarm
    found = whole.announced()
    let_change()
    assert whole.announced() is found
    assert found.digest() == Weights.of(1, host_tensors(state(1))).digest()
    assert np.array_equal(found.tensors["a"].words, host_tensors(state(1))["a"].words)


async def test_deltas_and_snapshots_beside_them_are_made_of_lent_weights_as_they_were(bus, served):
    """The memory that they were lent from has other numbers then."""
    for version in range(4):
        views = host_tensors(state(version))
        weights = LentWeights(views, {})
        manifest = await served.publish(weights.tensors, policy_version=version, stage="rl", trains_from=0)
        weights.let_change()
        for view in views.values():
            view.words[:] = 0
        assert same(await fetch_state(Blobs(bus), manifest), state(version))
    assert manifest.deltas
    await served._answer(SnapshotWanted(incarnation="one", policy_version=3, reason="a test"))
    await served.snapshots_written()
    assert same(await fetch_state(Blobs(bus), served.latest), state(3))


async def test_a_lent_version_is_announced_once_more_though_its_memory_has_changed(bus, tmp_path):
    whole = make(bus, snapshot_every=1)
    await whole.start(tmp_path)
    tensors, let_change = lent(0)
    first = await whole.publish(tensors, policy_version=0, stage="rl", trains_from=0)
    let_change()
    again = await whole.publish(lent(0)[0], policy_version=0, stage="done", trains_from=0)
    assert again == replace(first, stage="done")
    with pytest.raises(ValueError, match="other weights"):
        await whole.publish(lent(1)[0], policy_version=0, stage="done", trains_from=0)


async def test_the_announcement_comes_again_when_its_key_was_lost(bus, served):
    manifest = await publish(served, 0)
    await bus.delete("policy")
    wanted = SnapshotWanted(incarnation="", policy_version=-1, reason="a test")
    async with asyncio.timeout(TIMEOUT_S):
        while await bus.get("policy", PolicyManifest) is None:
            await bus.notify(bus.subject("notice", "snapshot"), wanted)
            await asyncio.sleep(0.02)
    assert await announced(bus) == manifest


async def test_config_and_tokenizer_that_the_bus_lost_are_stored_again_for_who_asks(bus, served, tmp_path):
    manifest = await publish(served, 0)
    await bus.js.purge_stream(bus.topology.stream("FILES"), subject=f"{manifest.model.subject}.*")
    with pytest.raises(BusError, match="not on the bus"):
        await fetch_model_files(bus, manifest.model, tmp_path / "there")
    stop = asyncio.Event()
    async with asyncio.timeout(TIMEOUT_S):
        there = await obtain_model(bus, manifest, tmp_path / "there", patience_s=TIMEOUT_S, stop=stop)
    assert [path.name for path in there.iterdir()] == ["config.json"]
    assert (await announced(bus)).snapshot == manifest.snapshot, "the weights were there all the time"


async def test_who_waits_for_a_model_that_nobody_stores_is_told_so_or_stops(bus, publisher, tmp_path):
    manifest, stop = await publish(publisher, 0), asyncio.Event()
    await bus.js.purge_stream(bus.topology.stream("FILES"))
    with pytest.raises(BusAwayError, match=r"waited 0 s for the model's config .* not on the bus"):
        await obtain_model(bus, manifest, tmp_path, patience_s=0.0, stop=stop)
    stop.set()
    assert await obtain_model(bus, manifest, tmp_path, patience_s=TIMEOUT_S, stop=stop) is None


async def test_a_model_too_large_for_the_stream_names_the_other_transports(bus):
    stream = bus.topology.stream("WEIGHTS")
    config = (await bus.js.stream_info(stream)).config
    await bus.js.update_stream(config.evolve(max_bytes=100 << 20))
    with pytest.raises(ConfigError, match=r"transport\.type to auto, http or files"):
        await BusBlobs(bus).put([bytes(64 << 20)], "one", 0)


async def test_versions_that_nobody_evaluates_are_not_kept_for_ever(bus, publisher):
    for version in range(8):
        await publish(publisher, version)
        publisher.pin(version)
    await publish(publisher, 8)
    assert sorted(publisher._held) == [4, 5, 6, 7, 8]
