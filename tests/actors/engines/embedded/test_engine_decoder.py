"""The batched decoder, one step at a time: what it samples is what the model says."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from actors.engines.embedded.decoder import BatchedDecoder, cache_argument
from actors.engines.embedded.engine import EXACT
from actors.engines.embedded.prepared_weights import prepare_weights
from bus.errors import EngineError
from tests.actors.tiny import CONTEXT, VOCAB, other_model, recomputed, request, tiny_model

PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15, 16], [17, 18], [3, 4, 5])
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def decoder_of(model, *, slots=16, prefill_tokens=4096) -> BatchedDecoder:
    decoder = BatchedDecoder(model, slots=slots, prefill_tokens=prefill_tokens, seed=0)
    decoder.policy_version = 0
    return decoder


def finish(decoder):
    finished = {}
    while decoder.busy:
        finished.update((request.request_id, generation) for request, generation in decoder.step())
    return finished


def forward_shapes(model):
    """Record the shape of the input of every forward."""
    shapes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_logprobs_are_the_models_own_for_prompts_of_any_length(kind, attention):
    model = tiny_model(kind, seed=0, attention=attention)
    decoder = decoder_of(model)
    decoder.submit([request(str(n), prompt, new=50) for n, prompt in enumerate(PROMPTS)])
    finished = finish(decoder)
    for n, prompt in enumerate(PROMPTS):
        generation = finished[str(n)]
        assert generation.finish_reason == "length"
        assert (len(generation.token_ids), generation.logprobs.dtype) == (50, np.float32)
        np.testing.assert_allclose(generation.logprobs, recomputed(model, prompt, generation), atol=1e-5)
        assert generation.policy_versions.tolist() == [0] * 50


@pytest.mark.parametrize("temperatures", [(0.7,) * 5, (1.0, 0.7, 1.3, 0.5, 2.0)])
def test_logprobs_are_of_the_temperature_scaled_distribution(model, temperatures):
    decoder = decoder_of(model)
    rows = list(zip(PROMPTS, temperatures, strict=True))
    decoder.submit([request(str(n), prompt, temperature=t) for n, (prompt, t) in enumerate(rows)])
    finished = finish(decoder)
    for n, (prompt, temperature) in enumerate(rows):
        expected = recomputed(model, prompt, finished[str(n)], temperature)
        np.testing.assert_allclose(finished[str(n)].logprobs, expected, atol=1e-5)


def test_logprobs_ignore_what_top_p_and_top_k_cut_away(model):
    decoder = decoder_of(model)
    decoder.submit([request("nucleus", PROMPTS[0], top_p=0.6), request("top", PROMPTS[1], top_k=3)])
    finished = finish(decoder)
    for name, prompt in (("nucleus", PROMPTS[0]), ("top", PROMPTS[1])):
        expected = recomputed(model, prompt, finished[name])
        np.testing.assert_allclose(finished[name].logprobs, expected, atol=1e-5)


def test_bfloat16_reports_float32_logprobs_near_the_models():
    model = tiny_model("qwen3", seed=0, dtype="bfloat16")
    decoder = decoder_of(model)
    decoder.submit([request("a", PROMPTS[0])])
    generation = finish(decoder)["a"]
    np.testing.assert_allclose(
        generation.logprobs, recomputed(model.float(), PROMPTS[0], generation), atol=0.5
    )


def test_greedy_answers_are_those_of_generate(model):
    decoder = decoder_of(model)
    decoder.submit([request(str(n), prompt, temperature=0.0) for n, prompt in enumerate(PROMPTS)])
    finished = finish(decoder)
    for n, prompt in enumerate(PROMPTS):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert finished[str(n)].token_ids.tolist() == expected[0, len(prompt) :].tolist()
        np.testing.assert_allclose(
            finished[str(n)].logprobs, recomputed(model, prompt, finished[str(n)]), atol=1e-5
        )


def test_siblings_share_one_prefill_and_keep_their_logprobs():
    model = tiny_model("qwen3", seed=0)
    decoder, shapes = decoder_of(model), forward_shapes(model)
    decoder.submit([request(str(n), PROMPTS[n % 2]) for n in range(8)])
    finished = finish(decoder)
    assert shapes[:2] == [(2, 9), (8, 1)]
    assert len({tuple(generation.token_ids) for generation in finished.values()}) > 2
    for n in range(8):
        expected = recomputed(model, PROMPTS[n % 2], finished[str(n)])
        np.testing.assert_allclose(finished[str(n)].logprobs, expected, atol=1e-5)


def test_a_burst_is_prefilled_in_bounded_pieces_between_decode_steps():
    model = tiny_model("qwen3", seed=0)
    decoder, shapes = decoder_of(model, prefill_tokens=20), forward_shapes(model)
    decoder.submit([request(str(n), [n + 1] * 9, new=3) for n in range(5)])
    decoder.submit([request("long", [7] * 50, new=3)])
    assert len(finish(decoder)) == 6
    prefills = [shape for shape in shapes if shape[1] > 1]
    assert prefills == [(2, 9), (2, 9), (1, 9), (1, 50)]
    assert shapes[1][1] == 1


def test_requests_join_and_leave_the_running_batch(model):
    decoder = decoder_of(model, slots=3)
    lengths = (5, 9, 2, 7, 1, 12, 40)
    decoder.submit([request(str(n), PROMPTS[n % 5], new=new) for n, new in enumerate(lengths)])
    assert (decoder.running, decoder.waiting) == (0, 7)
    early = decoder.step()
    assert decoder.running <= 3
    finished = {request.request_id: generation for request, generation in early} | finish(decoder)
    assert [len(finished[str(n)].token_ids) for n in range(7)] == list(lengths)
    assert decoder.tokens_generated == sum(lengths)
    for n in range(7):
        expected = recomputed(model, PROMPTS[n % 5], finished[str(n)])
        np.testing.assert_allclose(finished[str(n)].logprobs, expected, atol=1e-5)


def test_requests_of_the_oldest_lease_are_begun_first_and_those_of_one_version_as_they_come(model):
    decoder = decoder_of(model, slots=1)
    for name, version in (("begun", 4), ("b", 3), ("c", 2), ("d", 3)):
        decoder.submit([replace(request(name, PROMPTS[0], new=5), lease_version=version)])
        if name == "begun":
            decoder.step()
    assert [*finish(decoder)] == ["begun", "c", "b", "d"]


def test_a_stop_token_ends_the_row_and_is_its_last_token(model):
    decoder = decoder_of(model)
    stops = tuple(range(0, VOCAB, 4))
    decoder.submit(
        [request("all", PROMPTS[0], new=60, stop_token_ids=stops), request("none", PROMPTS[1], new=60)]
    )
    finished = finish(decoder)
    assert finished["all"].finish_reason == "stop"
    assert finished["all"].token_ids[-1] in stops
    assert not set(finished["all"].token_ids[:-1].tolist()) & set(stops)
    assert finished["none"].finish_reason == "length"


def test_a_swap_in_mid_generation_keeps_the_cache_and_marks_the_tokens():
    old, served = tiny_model("qwen3", seed=0), tiny_model("qwen3", seed=0)
    new = other_model()
    decoder = decoder_of(served)
    decoder.submit([request(str(n), prompt, new=20) for n, prompt in enumerate(PROMPTS)])
    for _ in range(7):  # the first step samples twice: prefill and decode
        assert decoder.step() == []
    decoder.swap_weights(prepare_weights(served, new.state_dict(), complete=True), 5)
    finished = finish(decoder)
    for n, prompt in enumerate(PROMPTS):
        generation = finished[str(n)]
        assert generation.policy_versions.tolist() == [0] * 8 + [5] * 12
        assert generation.kv_versions.tolist() == [0] * 20, "all look at keys that version 0 has computed"
        np.testing.assert_allclose(
            generation.logprobs[:8], recomputed(old, prompt, generation)[:8], atol=1e-5
        )
        np.testing.assert_allclose(
            generation.logprobs[8:], _after_swap(old, new, prompt, generation.token_ids, 8), atol=1e-5
        )


@torch.inference_mode()
def _after_swap(old, new, prompt, tokens, swapped_at):
    """The new model over the old one's cache: it ran from the last token of the old one on."""
    cache = DynamicCache()
    sequence = torch.tensor([[*prompt, *tokens.tolist()]])
    boundary = len(prompt) + swapped_at - 1
    cached = {cache_argument(new): cache}
    old(sequence[:, :boundary], **cached)
    logprobs = new(sequence[:, boundary:-1], **cached).logits[0].log_softmax(-1)
    return logprobs.gather(1, sequence[0, boundary + 1 :, None])[:, 0].numpy()


def test_prompts_after_a_swap_are_the_new_models_alone():
    served = tiny_model("qwen3", seed=0)
    decoder = decoder_of(served)
    decoder.submit([request("old", PROMPTS[0])])
    finish(decoder)
    decoder.swap_weights(prepare_weights(served, other_model().state_dict(), complete=True), 1)
    decoder.submit([request("new", PROMPTS[0])])
    generation = finish(decoder)["new"]
    np.testing.assert_allclose(
        generation.logprobs, recomputed(other_model(), PROMPTS[0], generation), atol=1e-5
    )


def test_abort_returns_the_tokens_so_far_and_leaves_the_others_alone(model):
    decoder = decoder_of(model, slots=2)
    decoder.submit([request("a", PROMPTS[0]), request("b", PROMPTS[1]), request("c", PROMPTS[2])])
    decoder.step()
    decoder.step()
    [(_, partial)], [(_, unstarted)] = decoder.abort("a"), decoder.abort("c")
    assert (partial.finish_reason, len(partial.token_ids)) == ("abort", 3)
    assert (unstarted.finish_reason, len(unstarted.token_ids)) == ("abort", 0)
    assert decoder.abort("unknown") == []
    finished = finish(decoder)
    assert set(finished) == {"b"}
    np.testing.assert_allclose(
        finished["b"].logprobs, recomputed(model, PROMPTS[1], finished["b"]), atol=1e-5
    )


def test_a_row_may_fill_the_whole_context(model):
    decoder = decoder_of(model)
    full = request("full", PROMPTS[0], new=CONTEXT - 9)
    decoder.check(full)
    decoder.submit([full])
    generation = finish(decoder)["full"]
    np.testing.assert_allclose(generation.logprobs, recomputed(model, PROMPTS[0], generation), atol=2e-5)


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [
        ([1] * 250, 7, "250 prompt tokens \\+ 7 new ones exceed the model's context of 256"),
        ([], 7, "0 prompt tokens"),
        ([1], 0, "0 new ones"),
        ([1, VOCAB], 7, "do not fit the model's vocabulary of 40"),
        ([-1], 7, "do not fit"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(model, prompt, new, words):
    with pytest.raises(EngineError, match=words):
        decoder_of(model).check(request("bad", prompt, new=new))


def test_exact_arithmetic_takes_a_model_of_more_context_and_refuses_what_is_longer_than_its_sums():
    config = Qwen2Config(**SIZES | {"max_position_embeddings": 2**17})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=EXACT).eval()
    decoder = BatchedDecoder(model, slots=1, prefill_tokens=64, seed=0, exact=True)
    decoder.check(request("fits", [1] * 60_000, new=5536))
    with pytest.raises(EngineError, match=r"model's and model\.numerics=exact's context of 65536"):
        decoder.check(request("long", [1] * 60_000, new=5537))


def test_weights_of_another_model_are_refused(model):
    state = model.state_dict()
    with pytest.raises(EngineError, match=r"no tensors named model\.extra"):
        prepare_weights(model, {**state, "model.extra": torch.zeros(1)}, complete=True)
    with pytest.raises(EngineError, match=r"norm\.weight has shape \(3,\), the model's is \(32,\)"):
        prepare_weights(model, {**state, "model.norm.weight": torch.zeros(3)}, complete=True)
    del state["model.norm.weight"]
    with pytest.raises(EngineError, match=r"missing: model\.norm\.weight"):
        prepare_weights(model, state, complete=True)
    assert len(prepare_weights(model, state, complete=False)) == len(state)


def test_tied_embeddings_need_only_one_name(model):
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert "lm_head.weight" not in prepare_weights(model, state, complete=True)


def test_prepared_weights_are_copies(model):
    state = {"model.norm.weight": torch.full((32,), 2.0, dtype=torch.bfloat16)}
    prepared = prepare_weights(model, state, complete=False)
    state["model.norm.weight"].zero_()
    assert prepared["model.norm.weight"].tolist() == [2.0] * 32


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "kind",
    [
        MistralConfig(**SIZES, sliding_window=6),
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
        Gemma3TextConfig(**SIZES, sliding_window=6, sliding_window_pattern=2, query_pre_attn_scalar=20),
        GptOssConfig(**SIZES, sliding_window=6, num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=lambda config: config.model_type,
)
def test_sliding_windows_and_sinks_are_those_of_the_model(kind, attention):
    if kind.model_type == "gpt_oss":
        attention = "eager"  # transformers has no other on CPU
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind, attn_implementation=attention).eval()
    decoder = decoder_of(model)
    decoder.submit([request(str(n), prompt, new=20 + n) for n, prompt in enumerate(PROMPTS)])
    finished = finish(decoder)
    for n, prompt in enumerate(PROMPTS):
        expected = recomputed(model, prompt, finished[str(n)])
        np.testing.assert_allclose(finished[str(n)].logprobs, expected, atol=1e-5)


def test_layers_that_see_tokens_in_another_way_are_refused():
    config = Qwen2Config(**SIZES)
    model = Qwen2ForCausalLM(config)
    config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(
        EngineError,
        match=r"sliding windows, and .*; this model has chunked_attention, full_attention: use sglang",
    ):
        decoder_of(model)
