"""The probe: fixed token sequences that the learner scores at each version, to compare engines with.

An engine that does not give them the same log-probs samples from another policy than it says."""

import numpy as np
from transformers import PretrainedConfig

from bus.messages import Probe
from learner.backends.base import Backend
from learner.data.packing import Sample
from learner.scoring.logprobs import score

SEQUENCES = 4
LENGTH = 32
LEFT_FREE = 7
"""Tokens of the context that SGLang keeps from prompts, those that it scores among them."""
SEED = 17
"""Seed of the tokens: random ones suit any vocabulary, and reach rows that training does not."""


def probe_tokens(config: PretrainedConfig) -> np.ndarray:
    """Return the sequences for a model, int32 [4, 32], or shorter ones where its context is."""
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", LEFT_FREE + LENGTH)
    length = min(LENGTH, max(2, context - LEFT_FREE))
    return np.random.default_rng(SEED).integers(0, text.vocab_size, (SEQUENCES, length), dtype=np.int32)


def scored_probe(backend: Backend) -> Probe:
    """Return the probe with the log-probs of the weights as they are. Every rank calls this."""
    tokens = probe_tokens(backend.hf_config)
    samples = [Sample(token_ids=row, loss_mask=np.ones(len(row), bool), streams={}) for row in tokens]
    found = score(backend, samples, tokens_per_micro_batch=tokens.size)
    return Probe(
        token_ids=tuple(tuple(row) for row in tokens.tolist()),
        logprobs=tuple(tuple(scores.logprobs[1:].tolist()) for scores in found),
    )
