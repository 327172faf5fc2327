"""Running servers that serve a further policy: no actor of another policy uses one at the same time."""

import asyncio
import json
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from actors.engines.fleet.engine_claims import EngineClaims
from actors.other_policies.further_policy import FurtherSettings, PolicyOpener
from actors.settings.actors import ActorsConfig
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from bus.codec import encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import ConfigError
from bus.streams.blob_store import put_blob
from bus.streams.publish import Publisher
from bus.topology import ensure
from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory
from storage.model_files.packed_files import bundle
from tests.actors.held_out import published
from tests.actors.tiny import tiny_model

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
URL = "http://there:30000"
SIZES = ScratchModel(layers=1, hidden_size=16, intermediate_size=16, heads=2, kv_heads=1, context=64)


@pytest.fixture
def directory(tmp_path):
    return build_model_directory(tmp_path / "scratch", SIZES, seed=0)


@pytest.fixture
async def rival(bus_server, directory):
    """The bus of a further policy's run, whose learner has published a version."""
    async with Bus.connect(BusConfig(url=bus_server.url), "test__rival", name="rival") as connected:
        await ensure(connected.js, connected.topology, shards=1)
        await connected.create_keys()
        files = await put_blob(connected, Publisher(connected), encode(bundle(directory)), "model")
        manifest = await published(connected, 0, tiny_model("qwen3", seed=1))
        await connected.put("policy", replace(manifest, model=files))
        yield connected


async def test_a_server_of_another_actors_policy_is_refused_to_a_further_policy_and_the_other_way_round(
    bus, connect, rival, directory, tmp_path
):
    own, further = SglangEngineConfig(url=URL), FurtherSettings(rival, SglangEngineConfig(url=URL), (), 4)
    async with connect("other") as other, AsyncExitStack() as opened:
        claims = await opened.enter_async_context(EngineClaims.open(bus, "actor-a", SglangEngineConfig()))
        opener = PolicyOpener(
            ActorsConfig(), {"rival": further}, opened, directory, claims, shards=1, logs=tmp_path
        )
        async with EngineClaims.open(other, "actor-b", own):
            with pytest.raises(ConfigError, match=rf"{URL}: actor-b uses this server"):
                await opener.open("rival", asyncio.Event())
        assert await opener.open("rival", asyncio.Event()) is not None
        with pytest.raises(ConfigError, match=rf"{URL}: actor-a uses this server"):
            async with EngineClaims.open(other, "actor-b", own):
                pytest.fail("two policies on one server")


async def test_a_further_policy_whose_learner_publishes_whole_weights_has_no_adapters_to_load(
    bus, rival, directory, tmp_path
):
    further = FurtherSettings(rival, SglangEngineConfig(adapter="loaded"), (), 4)
    async with AsyncExitStack() as opened:
        claims = EngineClaims(bus, "actor-a")
        opener = PolicyOpener(
            ActorsConfig(), {"rival": further}, opened, directory, claims, shards=1, logs=tmp_path
        )
        with pytest.raises(
            ConfigError, match=r"publishes whole weights: .*set actors\.engine\.adapter=merged"
        ):
            await opener.open("rival", asyncio.Event())


async def test_a_further_policy_that_sglang_would_compute_otherwise_is_refused_before_its_engines_start(
    bus, rival, directory, tmp_path
):
    other = Path(shutil.copytree(directory, tmp_path / "dynamic"))
    described = json.loads((other / "config.json").read_text())
    described["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (other / "config.json").write_text(json.dumps(described))
    files = await put_blob(rival, Publisher(rival), encode(bundle(other)), "other-model")
    manifest = await published(rival, 0, tiny_model("qwen3", seed=1))
    await rival.put("policy", replace(manifest, model=files))
    for engine in (SglangEngineConfig(), EmbeddedEngineConfig(seed=0)):
        further = FurtherSettings(rival, engine, (), 4)
        async with AsyncExitStack() as opened:
            opener = PolicyOpener(
                ActorsConfig(), {"rival": further}, opened, directory, EngineClaims(bus, "actor-a"),
                shards=1, logs=tmp_path,
            )  # fmt: skip
            if isinstance(engine, EmbeddedEngineConfig):
                assert await opener.open("rival", asyncio.Event()) is not None
            else:
                with pytest.raises(ConfigError, match="SGLang scales angles of the rope_type 'dynamic'"):
                    await opener.open("rival", asyncio.Event())
