"""Turns off the gradients of the weights that stay as they are, by their names in megatron-core."""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import EMBEDDING, OUTPUT
from learner.backends.megatron.conversion.families import FAMILIES, shape_of
from learner.backends.megatron.conversion.weights import global_name
from learner.backends.trainable import TrainableWeights


def freeze_others(
    chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, trainable: TrainableWeights
) -> None:
    """Turn off the gradients of what is not trained; comes before the data-parallel wrapper.

    Raises `ConfigError` as `TrainableWeights.frozen` does.
    """
    frozen = frozen_weights(hf_config, trainable)
    if EMBEDDING.megatron in frozen and hf_config.tie_word_embeddings:
        frozen.add(OUTPUT.megatron)  # the last stage of a pipeline has a copy of its own
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if global_name(chunk, name) in frozen:
                parameter.requires_grad = False


def frozen_weights(hf_config: PretrainedConfig, trainable: TrainableWeights) -> set[str]:
    """Return the names in megatron-core of the weights that are not trained; raises as above."""
    rules = FAMILIES[hf_config.model_type].rules(shape_of(hf_config))
    return trainable.frozen({rule.megatron: rule.parts for rule in rules})
