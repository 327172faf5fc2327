"""A SGLang server on a GPU that leaves its memory to others and takes it back."""

import numpy as np
import pytest
import torch

from actors.engines.fleet.colocation import able_to_release
from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from tests.actors.cuda import NEAR, PROMPT, SERVER, policy
from tests.actors.tiny import recomputed, request

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LEFT = 0.2
"""So much of what a server takes may stay with its processes: CUDA's own memory cannot be freed."""


def free_bytes() -> int:
    free, _ = torch.cuda.mem_get_info()
    return free


async def test_the_memory_of_a_server_is_free_between_release_and_resume(tmp_path):
    first, second = policy(0), policy(1)
    first.config.save_pretrained(tmp_path / "model")
    config = able_to_release(SglangEngineConfig(server=SERVER))
    assert config.server["enable_memory_saver"] is True
    before = free_bytes()
    engine = SglangEngine(tmp_path / "model", config, tmp_path / "engine.log")
    try:
        await engine.start()
        await engine.load_weights(first.state_dict(), 0)
        await engine.generate(request("warm", PROMPT, new=32))
        taken = before - free_bytes()
        for version, model in ((1, second), (2, first), (2, first)):
            await engine.release()
            assert before - free_bytes() < LEFT * taken
            if version != engine.policy_version:
                await engine.load_weights(model.state_dict(), version)
            await engine.resume()
            assert before - free_bytes() > (1 - LEFT) * taken
            generation = await engine.generate(request(f"v{version}", PROMPT, new=64))
            assert set(generation.policy_versions.tolist()) == {version}
            expected = recomputed(model.float(), PROMPT, generation)
            np.testing.assert_allclose(generation.logprobs, expected, atol=NEAR)
            model.bfloat16()
    finally:
        await engine.close()
