"""The embedded engine: a thread that decodes while requests, aborts and weights arrive."""

import asyncio
import json
import time

import numpy as np
import pytest
import torch

from actors.engines.embedded.engine import EmbeddedEngine
from actors.settings.engines import EmbeddedEngineConfig
from bus.errors import ConfigError, EngineError
from tests.actors.engines.embedded.halted_generation import halted_at
from tests.actors.tiny import other_model, recomputed, request, tiny_model
from tests.learner.tiny import tiny_config

PROMPT = [3, 4, 5, 6, 7]
LONG = 240


def called(engine, method) -> asyncio.Event:
    """The event is set when the engine thread has run the decoder's `method` once more."""
    event, loop, original = asyncio.Event(), asyncio.get_running_loop(), getattr(engine._decoder, method)

    def run(*args):
        result = original(*args)
        loop.call_soon_threadsafe(event.set)
        return result

    setattr(engine._decoder, method, run)
    return event


async def test_requests_are_admitted_while_others_run(serve, model):
    async with serve() as engine:
        halted = halted_at(engine, 4)
        long = asyncio.create_task(engine.generate(request("long", PROMPT, new=LONG)))
        await halted.wait()
        late = await engine.generate(request("late", [9, 8], new=5))
        assert not long.done()
        assert engine.running == 1
        first = await long
    np.testing.assert_allclose(late.logprobs, recomputed(model, [9, 8], late), atol=1e-5)
    np.testing.assert_allclose(first.logprobs, recomputed(model, PROMPT, first), atol=2e-5)
    assert engine.tokens_generated == LONG + 5


async def test_requests_of_one_turn_of_the_loop_are_admitted_together(serve):
    async with serve() as engine:
        submissions, submit = [], engine._decoder.submit
        engine._decoder.submit = lambda requests: (submissions.append(len(requests)), submit(requests))
        await asyncio.gather(*(engine.generate(request(str(n), PROMPT, new=2)) for n in range(50)))
    assert submissions == [50]


async def test_weights_swap_in_mid_generation(serve, model):
    async with serve() as engine:
        halted = halted_at(engine, 10)
        running = asyncio.create_task(engine.generate(request("a", PROMPT, new=LONG)))
        await halted.wait()
        began = time.monotonic()
        pause_s = await engine.load_weights(other_model().state_dict(), 7)
        took_s = time.monotonic() - began
        assert engine.policy_version == 7
        generation = await running
    assert generation.policy_versions.tolist() == [0] * 10 + [7] * (LONG - 10)
    expected = recomputed(model, PROMPT, generation)[:10]
    np.testing.assert_allclose(generation.logprobs[:10], expected, atol=1e-5)
    assert 0 <= pause_s <= took_s


async def test_abort_returns_the_tokens_so_far(serve):
    async with serve() as engine:
        halted = halted_at(engine, 10)
        running = asyncio.create_task(engine.generate(request("a", PROMPT, new=LONG)))
        await halted.wait()
        await engine.abort("a")
        generation = await running
        await engine.abort("a")
    assert generation.finish_reason == "abort"
    assert len(generation.token_ids) == len(generation.logprobs) == len(generation.policy_versions) == 10


async def test_cancelling_the_caller_frees_the_slot(serve):
    async with serve(slots=1) as engine:
        halted = halted_at(engine, 4)
        running = asyncio.create_task(engine.generate(request("a", PROMPT, new=LONG)))
        await halted.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        again = await engine.generate(request("a", PROMPT, new=2))
        assert len(again.token_ids) == 2
        assert engine.tokens_generated == 4 + 2
        assert (engine.running, engine.waiting) == (0, 0)


async def test_generation_waits_for_the_first_weights(serve):
    async with serve(policy_version=-1) as engine:
        submitted = called(engine, "submit")
        waiting = asyncio.create_task(engine.generate(request("a", PROMPT)))
        await submitted.wait()
        assert (engine.running, engine.waiting, waiting.done()) == (0, 1, False)
        await engine.load_weights(other_model().state_dict(), 3)
        generation = await waiting
    assert set(generation.policy_versions.tolist()) == {3}
    np.testing.assert_allclose(generation.logprobs, recomputed(other_model(), PROMPT, generation), atol=1e-5)


async def test_refused_weights_leave_the_engine_as_it_was(serve):
    async with serve() as engine:
        with pytest.raises(EngineError, match="another model's weights"):
            await engine.load_weights({"nonsense": torch.zeros(1)}, 1)
        assert engine.policy_version == 0
        assert len((await engine.generate(request("a", PROMPT))).token_ids) == 12


async def test_a_failure_in_the_thread_reaches_every_waiter_and_later_calls(serve):
    async with serve() as engine:
        halted = halted_at(engine, 6)
        calls = [asyncio.create_task(engine.generate(request(str(n), PROMPT, new=LONG))) for n in range(3)]
        await halted.wait()
        broken = {"model.norm.weight": torch.full((32,), torch.nan)}
        await engine.load_weights(broken, 1)
        for call in calls:
            with pytest.raises(EngineError, match="logits of policy version 1 are not finite"):
                await call
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate(request("later", PROMPT))
        with pytest.raises(EngineError, match="not finite"):
            await engine.load_weights({}, 2)


async def test_close_fails_what_is_in_flight_and_is_idempotent(serve):
    async with serve() as engine:
        halted = halted_at(engine, 4)
        running = asyncio.create_task(engine.generate(request("a", PROMPT, new=LONG)))
        await halted.wait()
        await engine.close()
        with pytest.raises(EngineError, match="was closed"):
            await running
    assert not engine._thread.is_alive()


async def test_an_engine_must_be_started_first():
    engine = EmbeddedEngine(tiny_model("qwen3", seed=0), EmbeddedEngineConfig())
    with pytest.raises(EngineError, match="was not started"):
        await engine.generate(request("a", PROMPT))
    await engine.close()


async def test_requests_are_checked_and_ids_unique(serve):
    async with serve(policy_version=-1) as engine:
        assert engine.longest_context == 256
        with pytest.raises(EngineError, match="exceed the model's context of 256"):
            await engine.generate(request("a", PROMPT, new=252))
        first = asyncio.create_task(engine.generate(request("a", PROMPT)))
        await asyncio.sleep(0)  # the task runs up to its wait
        with pytest.raises(EngineError, match="already in flight"):
            await engine.generate(request("a", PROMPT))
        await engine.abort("a")
        assert (await first).finish_reason == "abort"


async def test_a_directory_without_weights_gives_an_engine_that_waits_for_them(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_directory(tmp_path, EmbeddedEngineConfig())
    assert engine.policy_version == -1
    await engine.start()
    await engine.load_weights(model.state_dict(), 0)
    generation = await engine.generate(request("a", PROMPT))
    await engine.close()
    np.testing.assert_allclose(generation.logprobs, recomputed(model, PROMPT, generation), atol=1e-5)
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):
        EmbeddedEngine.from_directory(tmp_path, EmbeddedEngineConfig(), policy_version=0)


async def test_a_directory_with_weights_can_be_served_as_it_is(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    engine = EmbeddedEngine.from_directory(tmp_path, EmbeddedEngineConfig(), policy_version=4)
    await engine.start()
    generation = await engine.generate(request("a", PROMPT))
    await engine.close()
    assert set(generation.policy_versions.tolist()) == {4}
    np.testing.assert_allclose(generation.logprobs, recomputed(model, PROMPT, generation), atol=1e-5)


async def test_weights_that_are_not_finite_are_named_where_they_are_read_and_where_they_answer(
    model, tmp_path
):
    name = "model.layers.1.mlp.down_proj.weight"
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state[name][3, 5] = torch.inf
    model.save_pretrained(tmp_path, state_dict=dict(state))
    refusal = f"^{tmp_path}: 1 weights hold NaN or infinity, such as {name}: download"
    with pytest.raises(ConfigError, match=refusal):
        EmbeddedEngine.from_directory(tmp_path, EmbeddedEngineConfig(), policy_version=0)
    (tmp_path / "model.safetensors").unlink()
    engine = EmbeddedEngine.from_directory(tmp_path, EmbeddedEngineConfig())
    await engine.start()
    await engine.load_weights(state, 7)
    with pytest.raises(
        EngineError, match=f"version 7 are not finite: 1 of its weights hold NaN .* as {name}"
    ):
        await engine.generate(request("a", PROMPT))
    await engine.close()


async def test_an_idle_engine_sleeps(serve):
    async with serve() as engine:
        await engine.generate(request("a", PROMPT, new=2))
        steps, aborted = [], called(engine, "abort")
        engine._decoder.step = lambda: steps.append(1) or []
        await engine.abort("nobody")  # wakes the thread
        await aborted.wait()
        assert steps == []


async def test_a_seed_repeats_the_answers(serve):
    answers = []
    for _ in range(2):
        async with serve(seed=5) as engine:
            answers.append((await engine.generate(request("a", PROMPT))).token_ids.tolist())
    assert answers[0] == answers[1]


def test_a_loop_that_ends_without_close_ends_the_thread():
    engine = EmbeddedEngine(tiny_model("qwen3", seed=0), EmbeddedEngineConfig(), policy_version=0)

    async def abandon():
        await engine.start()
        halted = halted_at(engine, 2)
        engine._unsent.append(request("a", PROMPT, new=LONG))
        engine._send()
        await halted.wait()

    asyncio.run(abandon())
    engine._commands.put(lambda: None)
    engine._thread.join(20)
    assert not engine._thread.is_alive()


def test_a_model_without_sdpa_has_eager_attention(tmp_path):
    for family, attention in (("gpt_oss", "eager"), ("gemma3_text", "sdpa")):
        config = tiny_config(family)
        config.save_pretrained(tmp_path / family)
        engine = EmbeddedEngine.from_directory(tmp_path / family, EmbeddedEngineConfig())
        assert engine._decoder.model.config._attn_implementation == attention
