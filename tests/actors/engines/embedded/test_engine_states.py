"""Models whose layers keep a state, in the batched decoder: what it samples is what the model says."""

import copy
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from actors.engines.continued_generation import joined, next_piece
from actors.engines.embedded import decoder as decoding
from actors.engines.embedded.decoder import BatchedDecoder
from actors.engines.embedded.prepared_weights import prepare_weights
from bus.errors import EngineError
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


def test_a_cache_that_was_freed_has_no_states_and_begins_anew():
    model = family_model("qwen3_next")
    decoder = decoder_of(model)
    for name in ("before", "after"):
        decoder.submit([request(name, PROMPTS[0], temperature=0.0)])
        [generation] = finish(decoder).values()
        np.testing.assert_allclose(generation.logprobs, recomputed(model, PROMPTS[0], generation), **CLOSE)
        states = weakref.ref(decoder._cache.layers[0]._held["recurrent_states"])
        decoder.free_cache()
        assert states() is None


def test_a_request_that_is_aborted_goes_on_as_if_it_had_not_been():
    decoder = decoder_of(family_model("qwen3_next"))
    asked = [request(str(n), prompt, temperature=0.0) for n, prompt in enumerate(PROMPTS[:4])]
    decoder.submit(asked)
    undisturbed = finish(decoder)
    decoder.submit(asked)
    for _ in range(5):
        assert not decoder.step()
    begun = [decoder.abort(str(n))[0] for n in range(2)]  # rows behind them take their places
    decoder.submit([next_piece(each, part, 12 - len(part.token_ids)) for each, part in begun])
    finished = finish(decoder)
    rest = [finished[f"{each.request_id}-{len(part.token_ids)}"] for each, part in begun]
    found = [
        *(joined([part, end]) for (_, part), end in zip(begun, rest, strict=True)),
        finished["2"],
        finished["3"],
    ]
    for n, generation in enumerate(found):
        np.testing.assert_array_equal(generation.token_ids, undisturbed[str(n)].token_ids)
        np.testing.assert_allclose(generation.logprobs, undisturbed[str(n)].logprobs, **CLOSE)


@torch.inference_mode()
def test_states_of_requests_in_flight_stay_as_the_old_weights_made_them():
    model = family_model("qwen3_next")
    old, new = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(1)
    for parameter in new.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    decoder = decoder_of(model)
    decoder.submit([request(str(n), prompt) for n, prompt in enumerate(PROMPTS[:3])])
    for _ in range(4):
        assert not decoder.step()
    decoder.swap_weights(prepare_weights(model, new.state_dict(), complete=True), 1)
    for name, generation in finish(decoder).items():
        cache, tokens, expected = DynamicCache(config=model.config), PROMPTS[int(name)], []
        before = np.count_nonzero(generation.policy_versions == 0)
        assert 0 < before < 12
        for n, sampled in enumerate(generation.token_ids.tolist()):
            weights = old if n < before else new
            logits = weights(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True).logits[0, -1]
            expected.append(logits.log_softmax(-1)[sampled].item())
            tokens = [sampled]
        np.testing.assert_allclose(generation.logprobs, expected, **CLOSE)


def test_other_states_and_an_older_transformers_are_refused(monkeypatch):
    model = family_model("qwen3_next")
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "cache_argument", lambda _: "past_key_values")
        with pytest.raises(EngineError, match=r"linear_attention by transformers 5\.24 and later"):
            decoder_of(model)
    model.config.model_type = "another"
    with pytest.raises(EngineError, match="this model has full_attention, linear_attention: use sglang"):
        decoder_of(model)
