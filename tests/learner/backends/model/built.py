"""Megatron models with the weights of transformers' own."""

import torch

from learner.backends.megatron.conversion.weights import load_hf_weights
from learner.backends.megatron.model.model import build_model
from tests.learner.tiny import hf_state


def built_from(reference, state=None, dtype=torch.float32):
    """A model like the reference, with its weights or those of `state`."""
    model = build_model(reference.config, dtype=dtype)
    load_hf_weights([model], reference.config, state or hf_state(reference))
    return model
