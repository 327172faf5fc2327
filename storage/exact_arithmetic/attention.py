"""Attention whose result for a query depends on the tokens before it alone, to the bit.

Keys that a query does not see add zeros to exact sums. So it does not matter how many there are: a prompt in
one pass, a token at a time behind a cache, and a pack of sequences give the same."""

import torch
from torch import Tensor

from bus.errors import ConfigError
from storage.exact_arithmetic.elementary import exp, power_of_two
from storage.exact_arithmetic.sums import sum_of_fractions, term_bits, to_integers
from storage.settings.exact_arithmetic import MOST_TOKENS

SCORES_AT_ONCE = 2**20
"""Scores that a CPU takes at a time, in which one query of all sequences is not divided."""
SCORES_AT_ONCE_ON_CUDA = 2**26
"""Scores that a GPU takes at a time."""


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float, seen: Tensor | None = None) -> Tensor:
    """Return what queries make of the values that they see, float32 [B, heads, Q, v].

    Args:
        query: float32 [B, heads, Q, d].
        key: float32 [B, groups, S, d]; a group belongs to as many heads after one another.
        value: float32 [B, groups, S, v].
        scale: multiplies the scores.
        seen: bool [B, S], keys that each sequence's queries see. `None` is causal: the last query sees all
            keys, and each one before it a key less.

    Raises `ConfigError` for more keys than sums take."""
    if key.shape[2] > MOST_TOKENS:
        raise ConfigError(
            f"a sequence has {key.shape[2]} tokens, and model.numerics=exact attends to at most "
            f"{MOST_TOKENS}: leave it out, or set model.numerics=fast"
        )
    integer_bits, key_bits = term_bits(query.shape[-1])
    keys, key_unit = to_integers(key, key_bits)
    values, value_unit = to_integers(value, term_bits(MOST_TOKENS)[1])
    known = keys.transpose(-1, -2), key_unit.transpose(-1, -2), values, value_unit.transpose(-1, -2)
    queries, length = query.shape[2], key.shape[2]
    at_once = SCORES_AT_ONCE_ON_CUDA if query.is_cuda else SCORES_AT_ONCE
    step = max(1, at_once // (query.shape[0] * query.shape[1] * length))
    found = []
    for start in range(0, queries, step):
        rows, unit = to_integers(query[:, :, start : start + step], integer_bits)
        if seen is None:
            first = length - queries + start  # key of the first of these queries
            end = first + rows.shape[2]
            visible = torch.ones(rows.shape[2], end, dtype=torch.bool, device=rows.device).tril(first)
            visible = visible[None, None]
        else:
            end, visible = length, seen[:, None, None]
        within = known[0][..., :end], known[1][..., :end], known[2][..., :end, :], known[3][..., :end]
        found.append(_attend(rows, unit, *within, scale=scale, visible=visible))
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _attend(
    query: Tensor, query_unit: Tensor, key: Tensor, key_unit: Tensor, value: Tensor, value_unit: Tensor, *,
    scale: float, visible: Tensor,
) -> Tensor:  # fmt: skip
    """Attend with integers: queries [B, heads, q, d], keys [B, groups, d, S] and values [B, groups, S, v].
    Units are [B, heads, q, 1] of queries and [B, groups, 1, S] of keys and values; `visible`, bool, is
    [B, 1, q, S] or broadcast to it."""
    batch, heads, queries, _ = query.shape
    groups = key.shape[1]
    by_group = (batch, groups, heads // groups * queries, -1)
    scores = (query.reshape(by_group) @ key).mul_(query_unit.reshape(by_group)).mul_(key_unit)
    scores = scores.float().mul_(scale).view(batch, heads, queries, -1)
    scores.masked_fill_(~visible, -torch.inf)
    weights = exp(scores.sub_(scores.amax(-1, keepdim=True)))
    weights.masked_fill_(~visible, 0.0)
    total = sum_of_fractions(weights)
    # The unit of a value becomes part of its weight, so that the sum over keys has one unit.
    scaled = weights.view(batch, groups, -1, weights.shape[-1]) * value_unit
    integers, unit = _bounded(scaled, term_bits(MOST_TOKENS)[0])
    attended = (integers @ value).mul_(unit).view(batch, heads, queries, -1)
    return attended.div_(total).float()


def _bounded(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round rows of float64 numbers that are not negative, as `to_integers` does."""
    exponent = torch.frexp(x.amax(-1, keepdim=True)).exponent
    return (x * power_of_two(bits - exponent)).round_(), power_of_two(exponent - bits)
