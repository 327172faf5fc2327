"""An embedded engine without its thread, and what a learner says of the tokens that it sampled."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from actors.engines.base import Generation, GenerationRequest, Sampling
from actors.engines.embedded.decoder import BatchedDecoder
from actors.engines.embedded.engine import EXACT
from bus.kept_sets import KeptSets
from learner.backends.contract.backend import Backend
from learner.data.packing import Sample
from learner.logprobs.logprobs import score
from tests.learner.tiny import VOCAB

Sampled = list[tuple[GenerationRequest, Generation]]


def decoder_of(config: PretrainedConfig, *, exact: bool = True, slots: int = 7) -> BatchedDecoder:
    """An engine whose weights come by `swap_weights`; few slots, so that rows come and go."""
    attention = EXACT if exact else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    return BatchedDecoder(model, slots=slots, prefill_tokens=100, seed=0, exact=exact)


def random_requests(count: int, *, seed: int, **sampling: object) -> list[GenerationRequest]:
    """Prompts and answers of many lengths, some of them alike, at several temperatures."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 40, count)
    prompts = [tuple(np.random.default_rng(n % 7).integers(0, VOCAB, n).tolist()) for n in lengths]
    return [
        GenerationRequest(
            str(number),
            prompt,
            Sampling(
                temperature=float(draw.choice([1.0, 0.7, 1.3])),
                max_new_tokens=int(draw.integers(1, 50)),
                **sampling,
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def trained_sample(request: GenerationRequest, generation: Generation) -> Sample:
    """What the learner is given of an answer."""
    prompt, tokens = len(request.token_ids), generation.token_ids
    length = prompt + len(tokens)
    before = np.zeros(prompt, np.float32)
    kept = generation.kept
    return Sample(
        token_ids=np.concatenate((request.token_ids, tokens)).astype(np.int32),
        loss_mask=np.arange(length) >= prompt,
        streams={
            "behaviour_logprobs": np.concatenate((before, generation.logprobs)),
            "policy_versions": np.concatenate((before, generation.policy_versions)).astype(np.int32),
            "temperatures": np.full(length, request.sampling.temperature, np.float32),
            "advantages": 1.0,
        },
        kept=None if kept is None else KeptSets.joined([KeptSets.none(prompt), kept]),
    )


def differences(learner: Backend, sampled: Sampled, version: int, budget: int) -> np.ndarray:
    """Return how far the learner's log-probs are from those recorded of the tokens of a version."""
    samples = [trained_sample(*each) for each in sampled]
    found = score(learner, samples, tokens_per_micro_batch=budget)
    parts = [np.zeros(0, np.float32)]
    for sample, scores in zip(samples, found, strict=True):
        own = sample.loss_mask & (sample.streams["policy_versions"] == version)
        parts.append(np.abs(scores.logprobs - sample.streams["behaviour_logprobs"])[own])
    return np.concatenate(parts)


def shuffled(sampled: Sampled, seed: int) -> Sampled:
    """The same in another order, so that they are packed with others."""
    return [sampled[i] for i in np.random.default_rng(seed).permutation(len(sampled))]


def finished(decoder: BatchedDecoder, requests: Sequence[GenerationRequest]) -> Sampled:
    """Decode until all requests have ended."""
    decoder.submit(requests)
    sampled: Sampled = []
    with torch.inference_mode():
        while decoder.busy:
            sampled += decoder.step()
    return sampled
