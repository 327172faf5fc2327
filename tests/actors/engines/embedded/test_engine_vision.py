"""Images at the embedded engine: what transformers itself computes, in batches, turns and mixtures."""

import asyncio

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from actors.engines.embedded.engine import EmbeddedEngine
from actors.settings.engines import EmbeddedEngineConfig
from bus.errors import ConfigError
from tests.actors.shown import asked, recomputed
from tests.pictures import TINY, image_part, picture

CONFIG = EmbeddedEngineConfig(dtype="float32", slots=8, threads=1, seed=0)


@pytest.fixture(scope="module", params=TINY)
def directory(request, tmp_path_factory):
    return TINY[request.param](tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def model(directory):
    return AutoModelForImageTextToText.from_pretrained(directory).eval()


@pytest.mark.first(1, others=pytest.mark.slow)
async def test_log_probs_are_those_of_transformers_for_prompts_with_images_and_without(directory, model):
    one, other = image_part(picture(16, 24)), image_part(picture(40, 16, seed=1))
    text = {"type": "text", "text": "how many?"}
    requests = [
        asked(directory, "one", one, text),
        asked(directory, "sibling", one, text),
        asked(directory, "two", one, text, other),
        asked(directory, "again", other, other, text, new=5),
        asked(directory, "none", text),
    ]
    engine = EmbeddedEngine.from_directory(directory, CONFIG, policy_version=0)
    await engine.start()
    found = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    for request, generation in zip(requests, found, strict=True):
        wanted = recomputed(model, directory, request, generation)
        assert len(generation.token_ids) == request.sampling.max_new_tokens
        np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-5)


async def test_prompts_of_the_same_tokens_and_other_images_are_other_prompts(directory, model):
    requests = [asked(directory, str(n), image_part(picture(seed=n)), new=3) for n in range(2)]
    assert requests[0].token_ids == requests[1].token_ids
    engine = EmbeddedEngine.from_directory(directory, CONFIG, policy_version=0)
    await engine.start()
    found = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    for request, generation in zip(requests, found, strict=True):
        wanted = recomputed(model, directory, request, generation)
        np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-5)


def test_exact_arithmetic_is_refused_for_images(directory):
    with pytest.raises(ConfigError, match=r"model\.numerics=exact is for text alone"):
        EmbeddedEngine.from_directory(directory, CONFIG, exact=True)
