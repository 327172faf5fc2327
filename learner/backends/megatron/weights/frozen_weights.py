"""Turns off the gradients of the weights that stay as they are, by their names in megatron-core."""

from collections.abc import Sequence, Set

import torch
from transformers import PretrainedConfig

from bus.errors import ConfigError
from learner.backends.megatron.conversion.base import EMBEDDING, OUTPUT, Rule
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.weights.rank_weights import global_name
from learner.backends.megatron.weights.stacks import file_name, places_in, stacks_of
from learner.backends.shared.trainable import TrainableWeights
from learner.distributed.process_group import gathered


def freeze_others(chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, frozen: Set[str]) -> None:
    """Turn off the gradients of `frozen_weights`; comes before the data-parallel wrapper."""
    if EMBEDDING.megatron in frozen and hf_config.tie_word_embeddings:
        frozen = {*frozen, OUTPUT.megatron}  # the last stage of a pipeline has a copy of its own
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if global_name(chunk, name) in frozen:
                parameter.requires_grad = False


def frozen_weights(
    hf_config: PretrainedConfig, trainable: TrainableWeights, head: Sequence[Rule] = ()
) -> set[str]:
    """Return the names in megatron-core of the weights that are not trained, of the model and of a `head`.
    Raises `ConfigError` as `TrainableWeights.frozen` does."""
    rules = [*family_of(hf_config).rules(shape_of(hf_config)), *head]
    places = places_in(stacks_of(hf_config))
    return trainable.frozen(
        {rule.megatron: [file_name(part, places) for part in rule.parts] for rule in rules}
    )


def refuse_idle_ranks(chunks: Sequence[torch.nn.Module], settings: str, remedy: str) -> None:
    """Raise `ConfigError` on every rank when the optimizer of one would be empty. Every rank calls this.

    megatron-core trains so, and cannot save it: an empty optimizer does not say how many steps it took. Nor
    does it build one for experts alone. `settings` say what is trained."""
    trains = any(
        parameter.requires_grad and getattr(parameter, "allreduce", True)  # megatron-core's mark of experts
        for chunk in chunks
        for parameter in chunk.parameters()
    )
    if idle := [rank for rank, has in enumerate(gathered(trains)) if not has]:
        raise ConfigError(
            f"{settings} leave rank {', '.join(map(str, idle))} of the learner nothing to train besides "
            f"experts, which megatron-core's optimizer cannot save: {remedy}, or set fewer stages of "
            "learner.parallel.pipeline"
        )
