"""Attention that transformers' models call for packed sequences: none sees another's tokens.

It stands beside transformers' own kinds under the name `PACKED`. Layers whose attention has sinks (gpt-oss)
or capped scores (Gemma 2), for which torch has no kernel, compute the scores of one sequence after another,
or of several of similar length together."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from bus.errors import ConfigError
from learner.backends.shared.packed_attention import (
    Attend,
    LengthBucket,
    bucket_by_length,
    bucketed_attention,
    causal_attention,
    causal_varlen_attention,
    has_varlen_kernel,
    of_one_width,
    seen_keys,
)
from learner.data.packing import MicroBatch
from learner.host_memory.copies import to_device
from storage.exact_arithmetic import functions

PACKED = "sluice_packed"
"""Name of this attention in transformers."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Where the sequences of a pack lie, computed once for all layers."""

    cu_seqlens: Tensor
    """int32 [sequences + 1], where each begins, and T."""
    longest: int
    """Tokens of the longest one."""
    buckets: tuple[LengthBucket, ...]
    """Sequences by length."""
    slots: Tensor
    """int64 [T], place of each token in the padded buckets laid end to end."""
    windows: set[int]
    """Sliding windows, in tokens, of the layers that have attended so far."""
    exact: bool = False
    """Whether the sequences attend in exact arithmetic."""
    experts: Tensor | None = None
    """int [T, layers, k], the experts that each token goes to (learner/backends/fsdp/router_replay.py)."""

    @classmethod
    def of(cls, batch: MicroBatch, windows: set[int], *, exact: bool = False) -> "PackedSequences":
        """Find the sequences; the host does not wait for the device. Layers add theirs to `windows`."""
        buckets, slots = bucket_by_length(batch.lengths)
        slots = to_device(slots, batch.tokens.device)
        return cls(batch.cu_seqlens, max(batch.lengths), buckets, slots, windows, exact, batch.experts)


def packed_attention(  # noqa: PLR0913  # transformers names them one by one
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    packed: PackedSequences | None = None, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend within each sequence: [1, heads, T, d] and twice [1, groups, T, d] to [1, T, heads, d].

    Transformers passes what its models' attention has besides: a window of so many tokens, the bound of
    scores, and logits [heads] of sinks. Raises `ConfigError` for what would be ignored."""
    bias = others.get("position_bias")
    causal = others.get("is_causal") in (None, True) and getattr(module, "is_causal", True)
    if packed is None or attention_mask is not None or bias is not None or not causal:
        raise ConfigError(
            f"{type(module).__name__} of this model is no causal self-attention of packed sequences: "
            "learner.backend=fsdp cannot train it"
        )
    if sliding_window is not None:
        packed.windows.add(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    plain = softcap is None and s_aux is None
    if packed.exact:
        if not plain or sliding_window is not None:
            raise ConfigError(
                f"{type(module).__name__} has a sliding window, sinks or capped scores, which "
                "model.numerics=exact does not have: set model.numerics=fast"
            )
        exactly = partial(functions.causal_attention, scale=scale)
        return bucketed_attention(q, k, v, packed.buckets, packed.slots, exactly)[None], None
    if plain and has_varlen_kernel(q.device, q.dtype):
        return _of_any_lengths(q, k, v, packed, scale, sliding_window)[None], None
    attend: Attend
    if plain and (sliding_window is None or packed.longest <= sliding_window):
        attend = partial(causal_attention, scale=scale)
    else:
        attend = partial(_scored, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    return bucketed_attention(q, k, v, packed.buckets, packed.slots, attend)[None], None


AttentionInterface.register(PACKED, packed_attention)


def _of_any_lengths(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float, window: int | None
) -> Tensor:
    width = value.shape[-1]
    query, key, value = of_one_width(query, key, value)
    attended = causal_varlen_attention(
        query,
        key,
        value,
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.longest,
        packed.longest,
        scale=scale,
        window=window,
    )
    return attended[..., :width]


def _scored(
    query: Tensor, key: Tensor, value: Tensor, *,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend by scores [sequences, heads, length, length], whose softmax is float32; an `Attend`. A sink
    takes its share of the softmax of a query and gives nothing for it."""
    each = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    length = scores.shape[-1]
    scores = scores.masked_fill(~seen_keys(length, length, window, query.device), -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    return scores.softmax(-1)[..., :length].to(value.dtype) @ value
