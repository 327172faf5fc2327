"""Images at the embedded engine: what transformers itself computes, in batches, turns and mixtures."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.build import refuse_untried_images
from actors.engines.config import EmbeddedEngineConfig, SglangEngineConfig
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.sglang.request_bodies import request_body
from bus.errors import ConfigError, RequestRefusedError
from storage.images.chat import ImageChat, inlined
from tests.pictures import image_part, picture, vision_directory

CONFIG = EmbeddedEngineConfig(dtype="float32", slots=8, threads=1, seed=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vision_directory(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def model(directory):
    return AutoModelForImageTextToText.from_pretrained(directory).eval()


def asked(directory, name, *parts, new=9) -> GenerationRequest:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = ImageChat.of(directory, tokenizer)
    [message], found = inlined([{"role": "user", "content": list(parts)}], chat)
    tokens, images = chat.expanded(tokenizer.encode(message["content"]), found)
    return GenerationRequest(name, tokens, Sampling(max_new_tokens=new), images=images)


@torch.inference_mode()
def recomputed(model, directory, request, generation) -> np.ndarray:
    """Log-probs of the sampled tokens by transformers' own forward over the whole sequence."""
    reader = ImageChat.of(directory, AutoTokenizer.from_pretrained(directory)).reader
    tokens = torch.tensor([[*request.token_ids, *generation.token_ids.tolist()]])
    shown = {}
    if request.images:
        kinds = torch.zeros_like(tokens)
        for image in request.images:
            kinds[0, image.start : image.stop] = 1
        shown = {
            "pixel_values": torch.from_numpy(np.concatenate([reader.patches(one) for one in request.images])),
            "image_grid_thw": torch.tensor([reader.grid(one) for one in request.images]),
            "mm_token_type_ids": kinds,
        }
    logits = model(input_ids=tokens, use_cache=False, **shown).logits[0]
    sampled = torch.from_numpy(generation.token_ids).long()
    behind = logits.log_softmax(-1)[len(request.token_ids) - 1 : -1]
    return behind.gather(1, sampled[:, None])[:, 0].numpy()


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


def test_an_engine_that_was_not_tried_with_images_is_refused_by_name(directory):
    with pytest.raises(ConfigError, match=r"actors.engine.type=sglang was not tried .*embedded"):
        refuse_untried_images(SglangEngineConfig(), directory)
    refuse_untried_images(CONFIG, directory)
    with pytest.raises(RequestRefusedError, match="shows images, which are not sent to SGLang"):
        request_body(asked(directory, "one", image_part(picture())), rid="r", salt="")
