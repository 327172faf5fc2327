"""Attention in exact arithmetic, as a kind that models of transformers call by the name `EXACT`."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from bus.errors import ConfigError
from storage.exact_arithmetic.attention import attend
from storage.exact_arithmetic.functions import exactly

EXACT = "sluice_exact"
"""Name of this attention in transformers."""


def exact_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend from [n, heads, length, d] to [n, length, heads, d]: causally, or from one token a row to what a
    mask [n, 1, 1, keys] leaves at 0.

    Raises `ConfigError` for what would be ignored."""
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            f"{type(module).__name__} has sinks or capped scores, which model.numerics=exact does not have: "
            "set model.numerics=fast"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seen = None if attention_mask is None else attention_mask[:, 0, 0] == 0
    with exactly():
        return attend(query, key, value, scale=scale, seen=seen).transpose(1, 2), None


AttentionInterface.register(EXACT, exact_attention)
