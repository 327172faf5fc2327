"""Two trained policies in one actor process, each on a real SGLang server of its own."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.engines.base import Sampling
from actors.engines.fleet.build import engine_builds
from actors.engines.fleet.engine_claims import EngineClaims
from actors.engines.fleet.fleet import Fleet
from actors.other_policies.further_policy import FurtherSettings, PolicyOpener
from actors.policy.other_engines import OtherEngines
from actors.policy.policy import Policy
from actors.settings.actors import ActorsConfig
from actors.settings.engines import SglangEngineConfig
from actors.weights.follow import PolicyFollower
from bus.codec import encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.streams.blob_store import put_blob
from bus.streams.publish import Publisher
from bus.topology import ensure
from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory
from storage.model_files.packed_files import bundle
from tests.actors.held_out import published
from tests.actors.sglang_served import CONFIG, until

pytestmark = [pytest.mark.sglang, pytest.mark.nats, pytest.mark.timeout(1500)]
SIZES = ScratchModel(hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, context=256)
MOST_NATS = 2e-5
ENGINE = SglangEngineConfig(**{**CONFIG, "start_timeout_s": 900.0})  # two start at once


@pytest.fixture
async def rival(server):
    """The bus of the run that trains the further policy."""
    async with Bus.connect(BusConfig(url=server.url), "test__rival", name="rival") as connected:
        await ensure(connected.js, connected.topology, shards=1)
        await connected.create_keys()
        yield connected


def model_of(directory, seed):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@torch.inference_mode()
def logprobs_of(model, trajectory):
    ids = torch.tensor(trajectory.token_ids, dtype=torch.long)[None]
    found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    return found[trajectory.loss_mask[1:]]


async def assert_answered(policy, own, other):
    """Ask both policies; `own` and `other` are the version and the model that each is to have."""
    policy = policy.fresh(f"v{own[0]}-{other[0]}")
    await asyncio.gather(policy.chat("one"), policy.chat("two", agent="critic"))
    parts = {part.policy: part for part in policy.trajectories(1.0)}
    assert {name: part.agent for name, part in parts.items()} == {"default": "solver", "rival": "critic"}
    for name, (version, model) in {"default": own, "rival": other}.items():
        part = parts[name]
        assert set(part.policy_versions[part.loss_mask].tolist()) == {version}
        expected = logprobs_of(model, part)
        np.testing.assert_allclose(part.behaviour_logprobs[part.loss_mask], expected, rtol=0, atol=MOST_NATS)


@pytest.mark.nightly
async def test_each_policy_is_answered_by_its_own_server_whose_versions_are_its_own(bus, rival, tmp_path):
    directory = build_model_directory(tmp_path / "model", SIZES, seed=0)
    models = {seed: model_of(directory, seed) for seed in (1, 2, 3)}
    for where, version, seed in ((bus, 0, 1), (rival, 5, 2)):
        files = await put_blob(where, Publisher(where), encode(bundle(directory)), "model")
        manifest = await published(where, version, models[seed])
        await where.put("policy", replace(manifest, model=files))
    finished, stop = asyncio.Event(), asyncio.Event()
    async with AsyncExitStack() as opened:
        own = Fleet(
            engine_builds(ENGINE, directory, {"engine-0": 0}, tmp_path, actor="a"), ActorsConfig().fleet
        )
        opened.push_async_callback(own.close)
        claims = EngineClaims(bus, "actor-a")
        opener = PolicyOpener(
            ActorsConfig(engine=ENGINE), {"rival": FurtherSettings(rival, ENGINE, ("critic",), 4)}, opened,
            directory, claims, shards=1, logs=tmp_path,
        )  # fmt: skip
        further = await opener.open("rival", stop)
        assert further is not None
        await asyncio.gather(own.start(), further.start())
        others = OtherEngines(further={"rival": further.engine}, agents={"critic": "rival"})
        tokenizer = AutoTokenizer.from_pretrained(directory)
        policy = Policy(own, tokenizer, Sampling(max_new_tokens=16), others=others)

        async def have(*versions):
            async def there():
                return (own.policy_version, further.engine.policy_version) == versions

            await until(there, f"versions {versions}", 120.0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(PolicyFollower(bus, own).run(finished))
            tasks.create_task(further.run(finished))
            await have(0, 5)
            await assert_answered(policy, (0, models[1]), (5, models[2]))
            manifest = await published(rival, 6, models[3])
            await rival.notify(rival.subject("notice", "policy"), manifest)
            await have(0, 6)
            await assert_answered(policy, (0, models[1]), (6, models[3]))
            finished.set()
