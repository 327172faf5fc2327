"""SGLang servers that start, fail and end, for real on this machine's CPU (`make test-sglang`)."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.pending_request import PendingRequest
from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.server.server import OwnServer, group_members
from actors.settings.engines import SglangEngineConfig
from actors.settings.fleet import FleetConfig
from bus.errors import ConfigError, EngineError
from tests.actors.sglang_served import (
    CONFIG,
    FIRST,
    LONG,
    PROMPT,
    SECOND,
    group_of,
    in_flight,
    noted,
    started,
    until,
)
from tests.actors.tiny import recomputed, request

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(420)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rebuilt(model_dir, tmp_path_factory) -> AsyncIterator[tuple[Fleet, list[SglangEngine]]]:
    """A fleet of one engine, and every engine that it ever built."""
    directory, built = tmp_path_factory.mktemp("fleet"), []

    async def build():
        built.append(SglangEngine(model_dir, SglangEngineConfig(**CONFIG), directory / "engine.log"))
        return built[-1]

    fleet = Fleet({"engine-0": build}, FleetConfig(health_period_s=1.0, backoff_s=0.1))
    try:
        await fleet.start()
        await fleet.load_weights(FIRST.state_dict(), 3)
        await fleet.load_weights(SECOND.state_dict(), 4)
        yield fleet, built
    finally:
        await fleet.close()
    assert [group_of(engine) for engine in built] == [[]] * len(built)


async def tokens_handed_out(engine) -> list[int]:
    """Those of its only request, as soon as there are more than the first, which comes at once."""
    [flight] = engine.in_progress

    async def several():
        return len(flight.streamed.kept().token_ids) > 1

    await until(several, "a piece of the stream")
    return flight.streamed.kept().token_ids.tolist()


async def is_served_by_another(fleet, built, flight, why):
    """The present engine fails, and what was in flight comes from the next, by the newest weights."""
    failed, count = built[-1], len(built)
    generation = await flight
    assert why in failed.failure
    with pytest.raises(EngineError, match="has stopped"):
        await failed.check_health()
    assert len(built) == count + 1
    assert fleet.engines["engine-0"]["state"] == "serving"
    assert set(generation.policy_versions.tolist()) == {4}
    expected = recomputed(SECOND, PROMPT, generation)
    np.testing.assert_allclose(generation.logprobs, expected, atol=3e-5)  # of 1,500 tokens, the worst
    assert group_of(failed) == []


async def test_a_killed_server_is_replaced_by_the_fleet_with_the_newest_weights(rebuilt):
    fleet, built = rebuilt
    flight, before = started(fleet, "crash"), await built[-1].checksums()
    await in_flight(built[-1], flight)
    tokens = await tokens_handed_out(built[-1])
    os.kill(built[-1]._server.process.pid, signal.SIGKILL)
    await is_served_by_another(fleet, built, flight, "ended with signal SIGKILL")
    assert await built[-1].checksums() == before
    assert flight.result().token_ids[: len(tokens)].tolist() == tokens
    assert built[-1].tokens_generated <= LONG - len(tokens)


async def test_an_update_that_a_server_dies_in_says_how_it_ended(rebuilt, monkeypatch):
    class Unseen:
        async def ended(self, *, within_s):
            await asyncio.sleep(within_s)
            return ""

    engine = rebuilt[1][-1]
    monkeypatch.setattr(engine._health, "_server", Unseen())  # which would see it first, or not
    engine._health.doubt()
    os.kill(engine._server.process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="did not take policy version 9: it ended with signal SIGKILL"):
        await engine.load_weights(FIRST.state_dict(), 9)


@pytest.mark.nightly  # 80 s; a killed server is replaced in the same way
async def test_a_server_that_hangs_is_killed_and_replaced_by_the_fleet(rebuilt, monkeypatch):
    fleet, built = rebuilt
    hung = built[-1]
    impatient = hung._config.model_copy(update={"health_every_s": 1.0, "health_timeout_s": 5.0})
    monkeypatch.setattr(hung._health, "_config", impatient)
    flight = started(fleet, "hang")
    await in_flight(hung, flight)
    for pid in group_of(hung):
        os.kill(pid, signal.SIGSTOP)
    await is_served_by_another(fleet, built, flight, "did not generate within 5 s, 2 times")


@pytest.mark.nightly
async def test_a_mixture_of_experts_takes_published_weights_and_says_where_it_sent_the_tokens(tmp_path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "model")  # under the names of files, as the learner publishes
    state = load_file(tmp_path / "model/model.safetensors")
    asked = SglangEngineConfig(**CONFIG, routed_experts=True)
    engine = SglangEngine(tmp_path / "model", asked, tmp_path / "engine.log")
    first = replace(request("experts", PROMPT, new=32), experts_from=0)
    before = {name: torch.where(torch.rand(t.shape) < 0.05, t * 2, t) for name, t in state.items()}
    changes = []
    try:
        await engine.start()
        await engine.load_weights(before, 0)
        engine._client.load_changes = noted(engine._client.load_changes, changes, "changes")
        await engine.load_weights(state, 1)
        generation = await engine.generate(first)
        pending = PendingRequest(
            0, replace(first, request_id="again", sampling=replace(first.sampling, max_new_tokens=200))
        )
        flight = asyncio.create_task(engine.generate(pending.rest("cut")))
        await in_flight(engine, flight)
        await engine.abort("cut")
        pending.pieces = [await flight]
        pending.pieces.append(await engine.generate(pending.rest("rest")))
    finally:
        await engine.close()
    np.testing.assert_allclose(generation.logprobs, recomputed(model, PROMPT, generation), atol=1e-5)
    assert changes == ["changes"]
    assert pending.pieces[0].finish_reason == "abort"
    for found, new in ((generation, 32), (pending.generation(), 200)):
        assert found.routed_experts.dtype == np.uint8
        assert found.routed_experts.shape == (len(PROMPT) + new - 1, 2, 2)
        np.testing.assert_array_equal(np.sort(found.routed_experts), routed_by(model, PROMPT, found))


@torch.inference_mode()
def routed_by(model, prompt, generation) -> np.ndarray:
    """[L - 1, layers, experts per token] of transformers' routers over the whole sequence, in order."""
    sequence = torch.tensor([[*prompt, *generation.token_ids.tolist()]])
    layers = model(input_ids=sequence, use_cache=False, output_router_logits=True).router_logits
    return torch.stack([layer.topk(2).indices.sort().values for layer in layers], 1)[:-1].numpy()


ACTOR = """
import asyncio, sys
from pathlib import Path
from actors.settings.engines import SglangEngineConfig
from actors.engines.sglang.engine import SglangEngine

async def main():
    engine = SglangEngine(Path(sys.argv[1]), SglangEngineConfig(), Path(sys.argv[2]))
    starting = asyncio.create_task(engine.start())
    while engine._server.process is None:
        await asyncio.sleep(0.05)
    print(engine._server.process.pid, flush=True)
    await starting

asyncio.run(main())
"""


async def test_an_actor_that_is_killed_leaves_no_server_behind(model_dir, tmp_path):
    actor = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        ACTOR,
        str(model_dir),
        str(tmp_path / "engine.log"),
        stdout=asyncio.subprocess.PIPE,
    )
    group = int(await asyncio.wait_for(actor.stdout.readline(), 60.0))

    async def whole():
        return len(group_members(group)) >= 3  # the server, its scheduler, its detokenizer

    await until(whole, "the server's processes", timeout_s=120.0)
    actor.kill()
    await actor.wait()

    async def gone():
        return not group_members(group)

    await until(gone, "the end of the server's processes", timeout_s=20.0)


async def test_a_server_that_cannot_start_shows_what_it_said_last(model_dir, tmp_path):
    config = SglangEngineConfig(**CONFIG, server={"attention_backend": "nonsense"})
    engine = SglangEngine(model_dir, config, tmp_path / "engine.log")
    with pytest.raises(EngineError, match=r"status 2[\s\S]*invalid choice: 'nonsense'"):
        await engine.start()
    await engine.close()
    assert isinstance(engine._server, OwnServer)
    assert group_of(engine) == []


async def test_a_setting_that_this_sglang_does_not_have_is_refused(model_dir, tmp_path):
    config = SglangEngineConfig(**CONFIG, server={"mem-fraction-statc": 0.5})
    engine = SglangEngine(model_dir, config, tmp_path / "engine.log")
    with pytest.raises(
        ConfigError, match="no setting 'mem_fraction_statc': did you mean 'mem_fraction_static'"
    ):
        await engine.start()
    await engine.close()
