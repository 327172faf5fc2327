"""Layers that take a state from token to token, in packs: it begins anew at each sequence.

A gated delta net (linear attention) has a recurrent state, and before it a causal convolution that looks at
the tokens before; some models have such a convolution alone. Both would go on from one sequence of a pack to
the next. So these layers are given the sequences apart, those of similar length together. The shorter ones
are padded on the right, where a causal layer cannot look, so that no output and no gradient changes.

Transformers takes kernels of the packages `fla` and `causal_conv1d` where they are installed, also here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from learner.backends.fsdp.attention import PackedSequences
from learner.backends.shared.packed_attention import within_sequences
from storage.model_files.families import family_named


def begin_anew(model: PreTrainedModel) -> None:
    """Have the recurrent layers of a model begin anew at each sequence of a pack."""
    layers = family_named(model.config.model_type).recurrent
    for module in model.modules():
        if layers is not None and type(module).__name__ == layers.module:
            module.forward = partial(_mixed, module.forward)


def _mixed(
    mix: Callable[..., Tensor], hidden_states: Tensor, *, packed: PackedSequences | None = None, **others: Any
) -> Tensor:
    """Do what the layer does, [1, T, hidden] to the same, within each sequence of a pack if there is one."""
    if packed is None:
        return mix(hidden_states, **others)
    mixing = partial(mix, **others)
    return within_sequences(mixing, [hidden_states[0]], packed.buckets, packed.slots)[None]
