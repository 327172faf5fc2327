"""Megatron models with the weights of transformers' own."""

import torch

from learner.backends.megatron.model.model import build_chunks
from learner.backends.megatron.weights.rank_weights import load_hf_weights, stream_hf_weights
from learner.data.packing import pack
from tests.learner.tiny import hf_state, random_samples, reference_logits, tiny_model


def build_model(hf_config, *, dtype):
    """The whole model on this rank."""
    [model] = build_chunks(hf_config, dtype=dtype)
    return model


def export_hf_weights(chunks, hf_config):
    """Copies of the model's weights on rank 0; the others get nothing."""
    return {name: part.detach().clone() for name, part in stream_hf_weights(chunks, hf_config)}


def built_from(reference, state=None, dtype=torch.float32):
    """A model like the reference, with its weights or those of `state`."""
    model = build_model(reference.config, dtype=dtype)
    load_hf_weights([model], reference.config, state or hf_state(reference))
    return model


@torch.no_grad()
def logits_of_both(family, changes, lengths):
    """Logits of sequences in a pack, ours and transformers', of a tiny model with such a configuration."""
    reference = tiny_model(family, **changes)
    samples = random_samples(lengths)
    [batch] = pack(samples, 1000)
    return built_from(reference).logits(batch), reference_logits(reference, samples)
