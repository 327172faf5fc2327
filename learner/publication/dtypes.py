"""Tells which weights are published in a dtype of their own, and how large all of them are."""

from collections.abc import Iterator, Mapping
from math import prod

import torch

from bus.errors import ConfigError
from learner.model_directories.lazy_weights import Spec, State, main_dtype, spec_of


def exact_dtypes(state: State, published: torch.dtype, trained: torch.dtype) -> dict[str, torch.dtype]:
    """Return the weights that are published in another dtype than `published`, each with its own.

    A model that has some weights in a wider dtype than most, such as a router in float32 among bfloat16,
    needs them exact: these are published in `trained`, the learner's dtype, which rounds nothing.

    Args:
        state: weights of the initial model, of which only the dtypes are read.
        published: `learner.publish_dtype`.
        trained: dtype of the learner's weights, `model.dtype`.
    """
    if trained.itemsize <= published.itemsize:  # it has nothing that is more exact
        return {}
    specs = dict(_specs(state))
    most = main_dtype(specs.values())
    return {name: trained for name, spec in specs.items() if spec.dtype.itemsize > most.itemsize}


def published_bytes(state: State, published: torch.dtype, exact: Mapping[str, torch.dtype]) -> int:
    """Return the size of the published weights before any quantisation.

    Args:
        state: weights of the initial model, of which only shapes are read.
        published: `learner.publish_dtype`.
        exact: weights with another dtype, as `exact_dtypes` returns them.
    """
    return sum(prod(spec.shape) * exact.get(name, published).itemsize for name, spec in _specs(state))


def _specs(state: State) -> Iterator[tuple[str, Spec]]:
    for name in state:
        try:
            found = spec_of(state, name)
        except ConfigError:  # integers, say: no weight, for the model would not have been loaded
            continue
        yield name, found
