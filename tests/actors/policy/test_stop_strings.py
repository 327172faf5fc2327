"""An answer may end where a text stands: what follows was never recorded."""

from dataclasses import replace

import numpy as np
import pytest

from actors.engines.base import Generation, Sampling
from actors.policy.policy import Policy
from actors.policy.stop_strings import FIRST_PIECE
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import RequestRefusedError
from tests.actors.policy.families import FAMILIES

QWEN = FAMILIES["qwen3"].tokenizer
ONE = {"role": "user", "content": "one"}
TWO = {"role": "user", "content": "two"}


class Continuing(ScriptedEngine):
    """Writes `text` after the first prompt, however many requests that takes; reports experts if asked."""

    def __init__(self, text: str) -> None:
        self.tokens = QWEN.encode(text, add_special_tokens=False)
        self.begun: int | None = None
        super().__init__(self.rest, policy_version=4)

    def rest(self, prompt):
        self.begun = len(prompt) if self.begun is None else self.begun
        return self.tokens[len(prompt) - self.begun :]

    async def generate(self, request):
        found = await super().generate(request)
        if request.experts_from is None:
            return found
        rows = len(request.token_ids) + len(found.token_ids) - 1 - request.experts_from
        first = np.arange(request.experts_from, request.experts_from + rows) % 200
        experts = first.astype(np.uint8).reshape(-1, 1, 1)
        return Generation(
            found.token_ids, found.logprobs, found.policy_versions, found.finish_reason, experts
        )


def stopping(engine, *stop: str, most=500, **settings) -> Policy:
    return Policy(engine, QWEN, Sampling(stop=stop, max_new_tokens=most), **settings)


@pytest.mark.parametrize("before", [0, 10, FIRST_PIECE - 4, 3 * FIRST_PIECE, 400])
async def test_an_answer_ends_with_the_token_that_completes_a_stop_string(before):
    words = "x" * before + "<stop>"
    policy = stopping(engine := Continuing(words + "y" * 1000), "<stop>", "never", routed_experts=True)
    answer = await policy.chat([ONE])
    assert (answer.text, answer.content, answer.finish_reason) == (words, "x" * before, "stop")
    [trajectory] = policy.trajectories(0.0)
    assert QWEN.decode(trajectory.token_ids[trajectory.loss_mask]) == words
    assert trajectory.end == "completed"
    assert len(trajectory.token_ids) == len(trajectory.policy_versions)
    assert trajectory.routed_experts[:, 0, 0].tolist() == [
        n % 200 for n in range(len(trajectory.token_ids) - 1)
    ]
    assert sum(len(r.token_ids) > engine.begun for r in engine.requests) == len(engine.requests) - 1
    assert engine.tokens_generated <= max(FIRST_PIECE, 2 * len(words))
    assert len({request.sampling.seed for request in engine.requests}) == len(engine.requests)


async def test_an_answer_without_the_stop_string_ends_as_ever():
    policy = stopping(Continuing("x" * 300 + "<|im_end|>"), "never")
    answer = await policy.chat([ONE])
    assert (len(answer.text), answer.finish_reason) == (300, "stop")
    policy = stopping(Continuing("x" * 300), "never", most=200)
    answer = await policy.chat([ONE])
    assert (len(answer.text), answer.finish_reason) == (200, "length")


async def test_a_chat_goes_on_behind_a_stop_string():
    policy = stopping(engine := Continuing("so <stop>" + "y" * 100), "<stop>")
    first = await policy.chat([ONE])
    plain = replace(policy.sampling, stop=())
    engine.tokens, engine.begun = QWEN.encode("ok<|im_end|>", add_special_tokens=False), None
    await policy.chat([ONE, {"role": "assistant", "content": first.content}, TWO], sampling=plain)
    [trajectory] = policy.trajectories(0.0)
    text = QWEN.decode(trajectory.token_ids, skip_special_tokens=False)
    assert text.endswith(
        "assistant\nso <stop><|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nok<|im_end|>"
    )


async def test_an_aborted_answer_is_not_continued():
    engine = Continuing("x" * 300)
    policy = stopping(engine, "never")

    async def aborted(request):
        found = await ScriptedEngine.generate(engine, request)
        return Generation(found.token_ids[:5], found.logprobs[:5], found.policy_versions[:5], "abort")

    engine.generate = aborted
    answer = await policy.chat([ONE])
    assert (answer.text, answer.finish_reason) == ("xxxxx", "abort")
    assert len(engine.requests) == 1


async def test_a_context_that_is_full_keeps_what_was_sampled():
    class Small(Continuing):
        async def generate(self, request):
            if self.begun is not None and len(request.token_ids) > self.begun + FIRST_PIECE:
                raise RequestRefusedError("the context is full")
            return await super().generate(request)

    policy = stopping(Small("x" * 3000), "never", most=2000)
    answer = await policy.chat([ONE])
    assert answer.finish_reason == "length"
    assert len(policy.trajectories(0.0)) == 1
    assert len(answer.token_ids) == 2 * FIRST_PIECE
