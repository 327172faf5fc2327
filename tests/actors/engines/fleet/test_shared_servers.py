"""Which further policies the servers of the run's own serve, and that all of them have its frozen weights."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from actors.engines.fleet.engine_claims import EngineClaims
from actors.engines.fleet.shared_servers import SharedServers
from actors.engines.served_adapters import AdapterRoom
from actors.other_policies.further_policy import FurtherSettings, PolicyOpener, shared_servers
from actors.settings.actors import ActorsConfig
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from actors.weights.received import base_weights
from bus.codec import encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import ConfigError, EngineError
from bus.messages import AdaptedBase, BlobRef
from bus.requests import EngineChange
from bus.streams.blob_store import put_blob
from bus.streams.publish import Publisher
from bus.topology import ensure
from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory
from storage.model_files.packed_files import bundle
from storage.weights.blob_sources import Blobs
from storage.weights.tensors import Weights
from tests.actors.held_out import published
from tests.actors.tiny import tiny_model

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
LOADED = SglangEngineConfig(adapter="loaded")
BLOB = BlobRef(subject="s", chunks=1, size_bytes=1, digest="ab" * 16)
OWN = AdaptedBase(weights=BLOB, scale=2.0, rank=8, modules=("mlp.up_proj",))
THEIRS = replace(OWN, scale=1.0, rank=16, modules=("self_attn.q_proj",))


@pytest.fixture
async def rival(bus_server):
    """The bus of a further policy's run."""
    async with Bus.connect(BusConfig(url=bus_server.url), "test__rival", name="rival") as connected:
        await ensure(connected.js, connected.topology, shards=1)
        await connected.create_keys()
        yield connected


async def announced(bus, adapted):
    manifest = await published(bus, 0, tiny_model("qwen3", seed=1))
    await bus.put("policy", replace(manifest, adapted=adapted))


def opened_for(rival, *, shares, staleness=3):
    return {"rival": FurtherSettings(rival, LOADED, (), staleness, shares_servers=shares)}


def asked(policies, engine=LOADED, adapted=OWN):
    return shared_servers(engine, adapted, policies, asyncio.Event(), max_staleness=1, patience_s=5.0)


async def test_servers_are_started_for_the_adapters_of_all_policies_together(rival):
    await announced(rival, THEIRS)
    found = await asked(opened_for(rival, shares=True))
    assert found is not None
    theirs = found.further["rival"]
    assert (found.own.rank, found.own.versions, theirs.rank, theirs.versions) == (8, 3, 16, 5)
    assert found.own.room == theirs.room
    assert theirs.room == AdapterRoom(rank=16, modules=("q_proj", "up_proj"), slots=3 + 5 + 1)


async def test_a_policy_with_other_frozen_weights_is_refused_by_name_with_what_to_do(rival):
    await announced(rival, replace(THEIRS, weights=replace(BLOB, digest="cd" * 16)))
    wanted = r"policies\.rival: its frozen weights are others .*policies\.rival\.shares_servers=false"
    with pytest.raises(ConfigError, match=wanted):
        await asked(opened_for(rival, shares=True))


async def test_a_policy_that_publishes_whole_weights_is_at_no_server_that_adds_adapters(rival):
    await announced(rival, None)
    with pytest.raises(ConfigError, match="publishes whole weights"):
        await asked(opened_for(rival, shares=True))


async def test_frozen_weights_that_become_others_end_the_actor(rival):
    await announced(rival, THEIRS)
    found = await asked(opened_for(rival, shares=True))
    theirs = found.further["rival"]
    theirs.refuse_others(THEIRS)
    with pytest.raises(ConfigError, match=r"frozen weights are others now .* for several policies: start"):
        theirs.refuse_others(replace(THEIRS, weights=replace(BLOB, digest="cd" * 16)))


async def test_policies_that_do_not_share_are_not_waited_for(rival):
    alone = await asked(opened_for(rival, shares=False))
    assert (alone.further, alone.own.room.slots) == ({}, 4)
    whole = await asked(opened_for(rival, shares=True), engine=EmbeddedEngineConfig(), adapted=OWN)
    assert (whole.own, whole.further) == (None, {})


async def test_a_policy_at_the_runs_own_servers_has_one_engine_at_each_and_lets_none_join(
    bus, rival, tmp_path
):
    directory = build_model_directory(
        tmp_path / "scratch",
        ScratchModel(layers=1, hidden_size=16, intermediate_size=16, heads=2, kv_heads=1, context=64),
        seed=0,
    )
    files = await put_blob(rival, Publisher(rival), encode(bundle(directory)), "model")
    manifest = await published(rival, 0, tiny_model("qwen3", seed=1))
    await rival.put("policy", replace(manifest, adapted=THEIRS, model=files))
    policies = opened_for(rival, shares=True)
    shared = await asked(policies)
    assert isinstance(shared, SharedServers)

    async def never():
        raise AssertionError("nothing is started")

    hosts = shared.hosts({"engine-0": never, "engine-1": never})
    assert list(hosts) == ["engine-0", "engine-1"]
    async with AsyncExitStack() as opened:
        opener = PolicyOpener(
            ActorsConfig(engine=LOADED), policies, opened, directory, EngineClaims(bus, "actor-a"),
            shards=1, logs=tmp_path, shared=shared,
        )  # fmt: skip
        further = await opener.open("rival", asyncio.Event())
        assert list(further.engine.engines) == ["engine-0", "engine-1"]
        change = EngineChange(action="join", engine="http://there:1")
        with pytest.raises(
            EngineError, match="policy 'rival' is at the servers of the run's own: change those"
        ):
            await further._parts.admin._change(change)


async def test_frozen_weights_of_two_policies_are_on_the_host_once(bus, rival):
    sources, fetched = [Blobs(bus), Blobs(rival)], []

    async def fetch(adapted):
        fetched.append(adapted.identity)
        await asyncio.sleep(0)
        return Weights(0, {}, {})

    first, second = await asyncio.gather(*(base_weights(source, OWN, fetch) for source in sources))
    assert first is second
    assert fetched == [BLOB.digest]
    other = replace(OWN, digest="cd" * 16)
    assert await base_weights(sources[1], other, fetch) is not first
    elsewhere = replace(OWN, weights=replace(BLOB, digest="ef" * 32), digest=BLOB.digest)
    assert await base_weights(sources[0], elsewhere, fetch) is first
    assert fetched == [BLOB.digest, other.digest]
