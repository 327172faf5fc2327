"""Weights of files that are no part of the model, as those of heads for several next tokens."""

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.families import family_of
from learner.model_directories.lazy_weights import SomeWeights, State


def weights_beside(hf_config: PretrainedConfig, state: State) -> SomeWeights:
    """Return the weights of `state` that are beside the model."""
    beside = family_of(hf_config).beside
    return SomeWeights(state, [name for name in state if beside(name)])


def without_beside(hf_config: PretrainedConfig, state: State) -> SomeWeights:
    """Return the weights of `state` that are of the model."""
    beside = family_of(hf_config).beside
    return SomeWeights(state, [name for name in state if not beside(name)])
