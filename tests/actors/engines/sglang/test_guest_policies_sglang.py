"""Two policies at one real SGLang server, which has their frozen weights once and the adapters of both."""

from dataclasses import replace

import numpy as np
import pytest

from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.guest import GuestEngine
from actors.settings.engines import SglangEngineConfig
from tests.actors.adapters import adapter_of, served, with_adapter
from tests.actors.sglang_served import CONFIG, FIRST, MOST_NATS, PROMPT, in_flight, started
from tests.actors.tiny import recomputed

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(420)]
OWN, RIVAL = served(2), replace(served(2), rank=2, scale=0.75, modules=("k_proj", "up_proj"))
OWN, RIVAL = OWN.sharing([RIVAL], "base"), RIVAL.sharing([OWN], "base")
OURS = {version: adapter_of(FIRST, version) for version in (5, 6)}
THEIRS = {version: adapter_of(FIRST, 10 + version, RIVAL.modules, 2) for version in (0, 1, 2)}


def check(generation, version, model, prompt=PROMPT):
    """All tokens are of this version, and have the log-probs of transformers under that policy."""
    assert set(generation.policy_versions.tolist()) == {version}
    expected = recomputed(model, prompt, generation)
    np.testing.assert_allclose(generation.logprobs, expected, rtol=0, atol=MOST_NATS)


def ours(version):
    return with_adapter(FIRST, OURS[version])


def theirs(version):
    return with_adapter(FIRST, THEIRS[version], RIVAL.scale)


@pytest.mark.nightly
async def test_each_policys_tokens_are_those_of_its_own_adapters_under_the_same_frozen_weights(tmp_path):
    FIRST.config.save_pretrained(tmp_path / "model")
    config = SglangEngineConfig(**CONFIG, adapter="loaded")
    own = SglangEngine(tmp_path / "model", config, tmp_path / "engine.log", served=OWN)
    rival = GuestEngine(own, "rival", RIVAL)
    try:
        await own.start()
        await rival.start()
        await own.load_weights(FIRST.state_dict() | OURS[5], 5)
        await rival.load_weights(FIRST.state_dict() | THEIRS[0], 0)
        checksums = await own.checksums()
        # the same prompt: what one policy has computed of it is of no use to the other
        medium, long = started(own, "medium", new=200), started(rival, "long", new=3000)
        await in_flight(own, medium, long)
        await rival.load_weights(THEIRS[1], 1)
        await own.load_weights(OURS[6], 6)
        later, new = started(rival, "later", new=40), started(own, "new", new=40)
        check(await later, 1, theirs(1))
        check(await new, 6, ours(6))
        check(await medium, 5, ours(5))
        assert not long.done()
        await rival.load_weights(THEIRS[2], 2)  # one more than the policy may have
        partial = await long
        assert partial.finish_reason == "abort"
        check(partial, 0, theirs(0))
        check(await started(rival, "last", new=20), 2, theirs(2))
        check(await started(own, "too", new=20), 6, ours(6))
        for engine, model in ((own, ours(6)), (rival, theirs(2))):
            [scores] = await engine.score([PROMPT])
            wanted = model(own_tokens := FIRST.dummy_inputs["input_ids"].new_tensor([PROMPT])).logits[0]
            wanted = wanted.log_softmax(-1)[:-1].gather(1, own_tokens[0, 1:, None])[:, 0].detach()
            np.testing.assert_allclose(scores, wanted, rtol=0, atol=MOST_NATS)
        assert await own.checksums() == checksums, "the frozen weights stay as they are"
        names = [name for name in await own._client.adapters() if name.startswith("sluice-")]
        found = sorted((name.split("-")[5:], name.split("-")[3]) for name in names)
        assert found == [([], "v5"), ([], "v6"), (["rival"], "v1"), (["rival"], "v2")]
    finally:
        await rival.close()
        await own.close()
