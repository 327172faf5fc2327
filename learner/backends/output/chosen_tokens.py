"""Log-probabilities of chosen tokens and of all others together, for each row of logits.

The mass of the others is added up from their own logits. One less the chosen ones' would be rounding error
where these have nearly all of it, and its gradient as well."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.output.output_layer import (
    KeptColumns,
    RowStatistics,
    in_chunks,
    kept_columns,
    logprobs_of_logits,
    scaled_logits,
    softmax_sums,
    sums_over_ranks,
    whole_gradient,
)
from learner.data.top_tokens import NO_TOKEN

LEFT_OUT = -1e30
"""Logit of a column that does not count: its exponential is 0, and it is finite in every dtype of weights."""
LEAST_LOGPROB = -1e4
"""Lower bound in nats on log-probabilities, so that no mass at all has a finite one."""


def label_and_chosen_logprobs(
    hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor, chosen: KeptColumns, *,
    temperatures: Tensor, kept: KeptColumns | None = None, group: dist.ProcessGroup | None = None,
    chunk_size: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return what `label_logprobs` does, and `chosen_logprobs` of the same rows of logits [N, K + 1]."""

    def one_chunk(rows: Tensor, targets: Tensor, scale: Tensor, *sets: Tensor) -> tuple[Tensor, ...]:
        logits = project(rows)
        kept_here = KeptColumns(*sets[2:]) if sets[2:] else None
        return (
            *logprobs_of_logits(logits, targets, scale, kept_here, group),
            chosen_logprobs(logits, scale, KeptColumns(*sets[:2]), group),
        )

    return in_chunks(
        one_chunk, (hidden, labels, temperatures.reciprocal(), *chosen, *(kept or ())), chunk_size
    )


class TopOfRows(NamedTuple):
    """The likeliest tokens of N rows of logits."""

    token_ids: Tensor
    """int64 [N, K], `NO_TOKEN` behind a smaller vocabulary."""
    logprobs: Tensor
    """float32 [N, K + 1] nats, of these and of all others together; -inf behind a smaller vocabulary."""


class _ChosenLogprobs(torch.autograd.Function):
    """log softmax(scale * logits) of the chosen columns, and the logarithm of the others' mass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, scale: Tensor, chosen: KeptColumns, group: dist.ProcessGroup | None
    ) -> Tensor:
        values, column, here = scaled_logits(logits, scale, chosen, group)
        log_total = _log_total(logits, scale, group)
        log_others = _log_total(_without(logits, column, here), scale, group)
        ctx.save_for_backward(logits, scale, column, here, log_total, log_others)
        of_all = torch.cat((values, log_others[:, None]), dim=-1) - log_total[:, None]
        return of_all.clamp(min=LEAST_LOGPROB)

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor) -> tuple[Tensor | None, ...]:
        """With x = scale * logits: d log p[i] / d x = onehot(i) - p, and of the others' mass r(x) - p.

        r is the softmax over the others alone. Leaves the logits as they are, though a gradient may be
        written over what it is made from."""
        logits, scale, column, here, log_total, log_others = ctx.saved_tensors
        slopes = of_logprobs * scale[:, None]
        others_exist = log_others - log_total > LEAST_LOGPROB
        of_others = torch.where(others_exist, slopes[:, -1], 0.0)
        all_slopes = slopes[:, :-1].sum(-1) + of_others
        grad = _toward_others(logits.clone(), log_total, all_slopes, scale)
        log_others = torch.where(
            others_exist, log_others, -LEFT_OUT
        )  # else inf * 0: exp(x) of what has no mass
        grad += _toward_others(_without(logits, column, here), log_others, -of_others, scale)
        within = torch.where(here, slopes[:, :-1], 0.0).to(logits.dtype)
        return grad.scatter_add_(-1, column, within), None, None, None


def chosen_logprobs(
    logits: Tensor, scale: Tensor, chosen: KeptColumns, group: dist.ProcessGroup | None
) -> Tensor:
    """Return float32 [n, K + 1] nats, of the chosen tokens and of all others together; it carries gradient.

    What it says of entries that are none means nothing, but is finite; their slope must be 0.

    Args:
        logits: [n, v], this rank's part of the vocabulary.
        scale: float32 [n], multiplies the logits.
        chosen: tokens of each row, no token twice.
        group: tensor-parallel ranks that share the vocabulary; `None` is one rank."""
    found: Tensor = _ChosenLogprobs.apply(logits, scale, chosen, group)  # type: ignore[no-untyped-call]
    return found


def top_tokens(
    hidden: Tensor, project: Callable[[Tensor], Tensor], count: int, *, temperatures: Tensor, first: int,
    group: dist.ProcessGroup | None = None, chunk_size: int,
) -> TopOfRows:  # fmt: skip
    """Return the `count` likeliest tokens of each row, over the whole vocabulary; without gradient.

    Args:
        hidden: [N, H], inputs of the output layer.
        project: the output layer, [c, H] to the logits [c, v] of this rank's part of the vocabulary.
        count: tokens of each row.
        temperatures: float32 [N], which divide the logits.
        first: token of this rank's first column.
        group: tensor-parallel ranks that share the vocabulary; `None` is one rank.
        chunk_size: rows of logits alive at a time."""
    chunks = [
        _top_of_chunk(project(rows), divisors.reciprocal(), count, first, group)
        for rows, divisors in zip(
            torch.split(hidden, chunk_size), torch.split(temperatures, chunk_size), strict=True
        )
    ]
    return TopOfRows(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _top_of_chunk(
    logits: Tensor, scale: Tensor, count: int, first: int, group: dist.ProcessGroup | None
) -> TopOfRows:
    found = logits.float().topk(min(count, logits.shape[-1]), dim=-1)
    missing = count - found.values.shape[-1]
    values = torch.nn.functional.pad(found.values, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(found.indices + first, (0, missing), value=NO_TOKEN)
    if group is not None and group.size() > 1:
        values, ids = _of_all_ranks(values, group), _of_all_ranks(ids, group)
        values, order = values.topk(count, dim=-1)
        ids = ids.gather(-1, order)
    chosen = kept_columns(ids, first)
    logprobs = chosen_logprobs(logits, scale, chosen, group)
    logprobs[:, :-1].masked_fill_(ids == NO_TOKEN, -torch.inf)
    return TopOfRows(ids, logprobs)


def _of_all_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _without(logits: Tensor, column: Tensor, here: Tensor) -> Tensor:
    # added up, since the entries that are elsewhere all name column 0
    times = torch.zeros_like(logits, dtype=torch.uint8).scatter_add_(-1, column, here.to(torch.uint8))
    return logits.masked_fill(times > 0, LEFT_OUT)


def _toward_others(logits: Tensor, log_total: Tensor, slope: Tensor, scale: Tensor) -> Tensor:
    """Return -slope * exp(scale * logits - log_total); it may be written over the logits."""
    nowhere = torch.zeros_like(log_total, dtype=torch.int64)[:, None]
    found = RowStatistics(log_total, torch.zeros_like(log_total), log_total)
    return whole_gradient(logits, nowhere, nowhere > 0, found, slope, None, scale)


def _log_total(logits: Tensor, scale: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    largest, total, weighted = softmax_sums(logits, scale)
    largest, _, total, _ = sums_over_ranks(largest, torch.zeros_like(total), total, weighted, group)
    return largest + total.log()
