"""A SGLang server of two ranks on this machine's CPU: both have every version (`make test-sglang`)."""

import asyncio

import numpy as np
import pytest
import torch

from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from tests.actors.sglang_served import CONFIG, EACH_ON_A_CORE, FIRST, PROMPT, SECOND, group_of, noted
from tests.actors.tiny import recomputed, request

pytestmark = [pytest.mark.sglang, pytest.mark.nightly, pytest.mark.timeout(420)]


async def of_both_ranks(engine):
    """The checksums of what each rank computes with."""
    answer = await engine._client._call("POST", "/weights_checker", {"action": "checksum"}, timeout_s=60.0)
    return [rank["checksums"] for rank in answer["ranks"]]


@pytest.mark.parametrize(
    ("server", "written"),
    [pytest.param({"tp_size": 2}, ["changes"], id="cut"), pytest.param({"dp_size": 2}, [], id="replicated")],
)
async def test_both_ranks_take_new_weights_and_what_changed_of_them(model_dir, tmp_path, server, written):
    config = SglangEngineConfig(**CONFIG, server=server, environment=EACH_ON_A_CORE)
    engine, changes = SglangEngine(model_dir, config, tmp_path / "engine.log"), []
    try:
        await engine.start()
        for version, policy in enumerate((FIRST, SECOND)):
            await engine.load_weights(policy.state_dict(), version)
            prompts = [[n, *PROMPT] for n in range(4)]
            found = [engine.generate(request(f"v{version}-{n}", p, new=16)) for n, p in enumerate(prompts)]
            for prompt, generation in zip(prompts, await asyncio.gather(*found), strict=True):
                assert set(generation.policy_versions.tolist()) == {version}
                expected = recomputed(policy, prompt, generation)
                np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)
        engine._client.load_changes = noted(engine._client.load_changes, changes, "changes")
        torch.manual_seed(0)
        moved = SECOND.state_dict()
        before = await of_both_ranks(engine)
        for version in (2, 3, 4):
            moved = {
                name: torch.where(torch.rand(tensor.shape) < 0.05, tensor * 1.25, tensor)
                for name, tensor in moved.items()
            }
            await engine.load_weights(moved, version)
        assert changes == 3 * written
        assert (tmp_path / "engine.log").read_text().count("changes were prepared") == 4 * len(written)
        after = await of_both_ranks(engine)
        await engine.load_weights(FIRST.state_dict(), 5)
        await engine.load_weights(moved, 6)
        assert changes == 3 * written
        assert len(after) == 2
        assert before != after == await of_both_ranks(engine)
    finally:
        await engine.close()
    assert group_of(engine) == []
