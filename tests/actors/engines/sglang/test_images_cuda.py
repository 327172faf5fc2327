"""Images at a SGLang server on a GPU: `pytest -m gpu tests/actors/engines/sglang/test_images_cuda.py`."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError
from learner.config.model import ScratchModel, ScratchVision
from tests.actors.cuda import NEAR, SERVER
from tests.actors.shown import asked, recomputed
from tests.pictures import image_part, picture, vision_directory

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
SIZES = ScratchModel(
    hidden_size=512, layers=4, heads=8, kv_heads=4, intermediate_size=1024, context=2048,
    vision=ScratchVision(
        layers=4, hidden_size=256, heads=4, intermediate_size=512, patch_size=16, largest_pixels=65536,
    ),
)  # fmt: skip
ASKING = {"type": "text", "text": "how many?"}


async def test_log_probs_follow_images_and_both_towers_across_an_update(tmp_path):
    directory = vision_directory(tmp_path / "model", sizes=SIZES)
    other = vision_directory(tmp_path / "other", sizes=SIZES, seed=1)
    policies = [AutoModelForImageTextToText.from_pretrained(one).eval() for one in (directory, other)]
    for policy in policies:
        policy.get_input_embeddings().weight.data.mul_(4)  # and so the logits: the policies are far apart
    server = SERVER | {"dtype": "bfloat16", "mm_attention_backend": "triton_attn"}
    engine = SglangEngine(directory, SglangEngineConfig(server=server), tmp_path / "engine.log")
    shown = [image_part(picture(70, 100, seed=n)) for n in range(3)]
    try:
        try:
            await engine.start()
        except ConfigError as refused:
            if "use 0.5.23 or later" not in str(refused):
                raise
            pytest.skip(str(refused))  # earlier ones are refused for what no setting of theirs changes
        for version, policy in enumerate(policies):
            policy.bfloat16()
            state = {name: tensor for name, tensor in policy.state_dict().items() if name != "lm_head.weight"}
            await engine.load_weights(state, version)
            requests = [asked(directory, f"v{version}-{n}", one, ASKING) for n, one in enumerate(shown)]
            requests.append(asked(directory, f"v{version}-all", *shown, ASKING))
            found = await asyncio.gather(*map(engine.generate, requests))
            policy.float()
            for request, generation in zip(requests, found, strict=True):
                assert set(generation.policy_versions.tolist()) == {version}
                wanted = recomputed(policy, directory, request, generation)
                np.testing.assert_allclose(generation.logprobs, wanted, atol=3 * NEAR)
            with torch.inference_mode():
                unseen = recomputed(policies[1 - version].float(), directory, requests[0], found[0])
            assert np.abs(unseen - found[0].logprobs).max() > 10 * NEAR
    finally:
        await engine.close()
