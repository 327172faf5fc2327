"""A prefill server on one GPU and a decode server on another as one engine (`pytest -m multi_gpu`).

They need a transfer backend beside SGLang: `pip install nixl nixl-cu13` (59 MB for Python 3.12), or
`mooncake-transfer-engine-cuda13` (50 MB), which wants the system's libibverbs1."""

import asyncio
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from tests.actors.cuda import NEAR, PROMPT, SERVER, policy
from tests.actors.tiny import recomputed, request

BACKENDS = [name for name in ("nixl", "mooncake") if find_spec(name)]
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(not (find_spec("sglang") and BACKENDS), reason="needs sglang with nixl or mooncake"),
]
LIMIT_S = 120.0


async def test_keys_and_values_go_from_one_gpu_to_another_and_weights_to_both(tmp_path):
    first, second = policy(0), policy(1)
    first.config.save_pretrained(tmp_path / "model")
    config = SglangEngineConfig(
        server=SERVER | {"mem_fraction_static": 0.1},
        disaggregation={"enabled": True, "transfer": BACKENDS[0]},
    )
    engine = SglangEngine(tmp_path / "model", config, tmp_path / "engine.log")
    prompts = [PROMPT, list(range(5, 505)) * 4]
    try:
        await engine.start()
        await engine.load_weights(first.state_dict(), 0)
        flights = [
            asyncio.create_task(engine.generate(request(f"in-flight-{n}", PROMPT, new=500)))
            for n in range(32)
        ]
        await asyncio.sleep(0)
        of_first = [await engine.generate(request(f"v0-{n}", p, new=64)) for n, p in enumerate(prompts)]
        await engine.load_weights(second.state_dict(), 1)
        of_second = [await engine.generate(request(f"v1-{n}", p, new=64)) for n, p in enumerate(prompts)]
        across = await asyncio.wait_for(asyncio.gather(*flights), LIMIT_S)
        checksums = await engine.checksums()
    finally:
        await engine.close()
    for generations, model in ((of_first, first.float()), (of_second, second.float())):
        for prompt, generation in zip(prompts, generations, strict=True):
            assert set(generation.policy_versions.tolist()) == {0 if model is first else 1}
            np.testing.assert_allclose(generation.logprobs, recomputed(model, prompt, generation), atol=NEAR)
    for generation in across:  # 0.5.17 ends them at the update
        versions = generation.policy_versions.tolist()
        old = versions.count(0)
        assert old > 0
        assert versions == [0] * old + [1] * (len(versions) - old)
        expected = recomputed(first, PROMPT, generation)[:old]
        np.testing.assert_allclose(generation.logprobs[:old], expected, atol=NEAR)
    decodes = {name: checksum for name, checksum in checksums.items() if not name.startswith("prefill.")}
    assert decodes
    assert all(checksums[f"prefill.{name}"] == checksum for name, checksum in decodes.items())
