"""Models whose layers keep a state, in the batched decoder: what it samples is what the model says."""

from dataclasses import replace

import numpy as np
import pytest

from actors.engines.embedded import decoder as decoding
from actors.engines.embedded.decoder import BatchedDecoder
from bus.errors import EngineError
from learner.backends.fsdp.recurrent_layers import RECURRENT
from tests.actors.tiny import recomputed, request
from tests.learner.backends.fsdp.families import RECURRENT_FAMILIES, family_model
from tests.learner.backends.router_reference import chosen_experts

CLOSE = {"rtol": 0, "atol": 3e-5}
"""A pass over a whole sequence and a step of one token round differently in float32."""
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15, 16], [17, 18], [3, 4, 5], [16, 15, 14, 13])


def decoder_of(model, **settings) -> BatchedDecoder:
    decoder = BatchedDecoder(model, **{"slots": 16, "prefill_tokens": 4096, "seed": 0, **settings})
    decoder.policy_version = 0
    return decoder


def finish(decoder):
    finished = {}
    while decoder.busy:
        finished.update((each.request_id, generation) for each, generation in decoder.step())
    return finished


@pytest.mark.parametrize(
    "family",
    [pytest.param(n, marks=() if n == "qwen3_next" else pytest.mark.slow) for n in RECURRENT_FAMILIES],
)
def test_requests_join_and_leave_and_their_logprobs_are_the_models_own(family):
    model = family_model(family)
    decoder = decoder_of(model, slots=4)
    lengths = (5, 9, 2, 7, 1, 12, 40, 30)
    decoder.submit([request(str(n), PROMPTS[n % 6], new=new) for n, new in enumerate(lengths)])
    finished = finish(decoder)
    assert [len(finished[str(n)].token_ids) for n in range(8)] == list(lengths)
    for n in range(8):
        expected = recomputed(model, PROMPTS[n % 6], finished[str(n)])
        np.testing.assert_allclose(finished[str(n)].logprobs, expected, **CLOSE)


def test_prompts_of_one_length_share_a_pass_and_equal_ones_a_row():
    model, shapes = family_model("qwen3_next"), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    decoder = decoder_of(model)
    decoder.submit([request(str(n), PROMPTS[2 + n % 4]) for n in range(8)])
    finished = finish(decoder)
    assert shapes[:4] == [(1, 2), (1, 3), (2, 4), (8, 1)]
    for n in range(8):
        expected = recomputed(model, PROMPTS[2 + n % 4], finished[str(n)])
        np.testing.assert_allclose(finished[str(n)].logprobs, expected, **CLOSE)


def test_each_token_has_the_experts_that_its_own_pass_chose():
    model = family_model("qwen3_next")
    decoder = decoder_of(model, slots=3, routed_experts=True)
    decoder.submit(
        [replace(request(str(n), prompt, new=4 + n), experts_from=0) for n, prompt in enumerate(PROMPTS)]
    )
    finished = finish(decoder)
    for n, prompt in enumerate(PROMPTS):
        whole = [*prompt, *finished[str(n)].token_ids.tolist()]
        np.testing.assert_array_equal(finished[str(n)].routed_experts, chosen_experts(model, whole)[:-1])


def test_a_cache_that_was_freed_begins_with_new_states():
    model = family_model("qwen3_next")
    decoder = decoder_of(model)
    for name in ("before", "after"):
        decoder.submit([request(name, PROMPTS[0], temperature=0.0)])
        [generation] = finish(decoder).values()
        np.testing.assert_allclose(generation.logprobs, recomputed(model, PROMPTS[0], generation), **CLOSE)
        decoder.free_cache()


def test_the_engine_serves_the_families_that_the_learner_trains():
    assert {name: layers.kind for name, layers in RECURRENT.items()} == decoding.WITH_STATES


def test_other_states_and_an_older_transformers_are_refused(monkeypatch):
    model = family_model("qwen3_next")
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "cache_argument", lambda _: "past_key_values")
        with pytest.raises(EngineError, match=r"linear_attention by transformers 5\.24 and later"):
            decoder_of(model)
    model.config.model_type = "another"
    with pytest.raises(EngineError, match="this model has full_attention, linear_attention: use sglang"):
        decoder_of(model)
