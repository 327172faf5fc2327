"""Causal attention over sequences of different lengths that lie end to end, without padding in memory for
long.

On CUDA a kernel takes any lengths. Elsewhere sequences of similar length are padded to one another."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST_TO_SHORTEST = 2
"""Sequences attended to in one call differ in length by at most this factor, which bounds the padding."""
PACK_DEPENDENT_ROPES = {"longrope"}
"""Rotary embeddings whose angles follow from the longest sequence, which is another one in each pack, long
before the model's context is full."""


class LengthBucket(NamedTuple):
    """Sequences of similar length, attended to in one call."""

    sequences: int
    length: int
    """Tokens of the longest one. Others are padded on the right, where a causal mask hides the padding."""


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of [sequences, heads, length, d] to keys and values [sequences, groups, length, d]."""


def has_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether torch has a kernel for sequences of any lengths in one call there."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def bucket_by_length(lengths: Sequence[int]) -> tuple[tuple[LengthBucket, ...], Tensor]:
    """Group sequences of similar length; return the groups and the int64 [T] padded slot of each token."""
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    buckets: list[LengthBucket] = []
    first_slot = [0] * len(lengths)
    end = 0
    while by_length:
        longest = lengths[by_length[0]]
        similar = [i for i in by_length if lengths[i] * LONGEST_TO_SHORTEST >= longest]
        by_length = by_length[len(similar) :]
        for row, sequence in enumerate(similar):
            first_slot[sequence] = end + row * longest
        buckets.append(LengthBucket(len(similar), longest))
        end += len(similar) * longest
    slots = torch.cat([torch.arange(slot, slot + n) for slot, n in zip(first_slot, lengths, strict=True)])
    return tuple(buckets), slots


def seen_keys(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [queries, keys]: the last query sees all keys, or the last `window` of them, and each query
    before it one key further back."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries + 1 - window)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """Attend to all tokens before, or to the last `window`; an `Attend`."""
    length = query.shape[-2]
    if window is not None and window < length:
        seen = seen_keys(length, length, window, query.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def of_one_width(*heads: Tensor) -> list[Tensor]:
    """Return queries, keys and values of the width of the widest, as kernels want them; zeros change no
    score."""
    widest = max(x.shape[-1] for x in heads)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in heads]


def bucketed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    buckets: Sequence[LengthBucket],
    slots: Tensor | None,
    attend: Attend,
) -> Tensor:
    """Attend within each sequence, with one call of `attend` for each bucket.

    Args:
        query: [T, heads, d].
        key: [T, groups, d].
        value: [T, groups, d].
        buckets: of sequences, which hold all T tokens.
        slots: int64 [T], place of each token in the padded buckets laid end to end; `None` is the same place.
        attend: is given padding on the right.

    Returns [T, heads, d]."""

    def mix(*heads: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in heads)
        return attend(q, k, v).transpose(1, 2)

    return within_sequences(mix, (query, key, value), buckets, slots)


def within_sequences(
    mix: Callable[..., Tensor],
    packed: Sequence[Tensor],
    buckets: Sequence[LengthBucket],
    slots: Tensor | None,
) -> Tensor:
    """Mix the tokens of each sequence, and none with those of another.

    Args:
        mix: makes [sequences, length, ...] of as many as there are in `packed`, by causal steps: shorter
            sequences have zeros behind them, which no token of theirs may see.
        packed: each [T, ...].
        buckets: of sequences, which hold all T tokens.
        slots: int64 [T], place of each token in the padded buckets laid end to end; `None` is the same place.

    Returns [T, ...]."""
    padded = (laid_out(x, buckets, slots) for x in packed)
    flat = [mix(*of_bucket).flatten(0, 1) for of_bucket in zip(*padded, strict=True)]
    return flat[0] if slots is None else torch.cat(flat).index_select(0, slots)


def laid_out(packed: Tensor, buckets: Sequence[LengthBucket], slots: Tensor | None) -> list[Tensor]:
    """Lay [T, ...] out as one [sequences, length, ...] per bucket, with zeros behind shorter sequences."""
    sizes = [bucket.sequences * bucket.length for bucket in buckets]
    if slots is not None:
        packed = packed.new_zeros(sum(sizes), *packed.shape[1:]).index_copy(0, slots, packed)
    parts = torch.split(packed, sizes) if len(sizes) > 1 else (packed,)  # the gradient of this is a copy
    return [part.view(*bucket, *part.shape[1:]) for part, bucket in zip(parts, buckets, strict=True)]


def causal_varlen_attention(  # noqa: PLR0913 - those of torch's kernel
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend with torch's kernel for runs of any lengths; the last query of a run sees all its keys, or the
    last `window` of them."""
    from torch.nn.attention.varlen import varlen_attn  # loads torch's compiler, which only GPUs need

    queries_per_group = query.shape[1] // key.shape[1]
    return varlen_attn(  # type: ignore[return-value]
        query,
        key.repeat_interleave(queries_per_group, dim=1),  # torch 2.11 has no enable_gqa here
        value.repeat_interleave(queries_per_group, dim=1),
        cu_queries,
        cu_keys,
        max_queries,
        max_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
