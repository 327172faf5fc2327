"""What a policy's forward pass returns, made from the hidden states of its last layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bus.errors import ConfigError
from learner.backends.output.chosen_tokens import label_and_chosen_logprobs, top_tokens
from learner.backends.output.output_layer import (
    KeptColumns,
    TokenLoss,
    capped,
    columns_here,
    in_chunks,
    kept_columns,
    label_logprobs,
    logprobs_of_logits,
    output_layer_loss,
)
from learner.backends.sglang_kernels.functions import linear as sglang_linear
from learner.backends.sglang_kernels.functions import logprobs_and_entropy
from learner.backends.sglang_kernels.kernels import SglangKernels
from learner.data.packing import MicroBatch
from storage.exact_arithmetic.elementary import exp
from storage.exact_arithmetic.functions import linear as exact_linear
from storage.exact_arithmetic.functions import with_gradient
from storage.exact_arithmetic.softmax import largest_and_log_total

Values = Callable[[Tensor, Tensor, Tensor, KeptColumns | None], tuple[Tensor, Tensor]]
"""Log-probs and entropies, float32 [c], of logits [c, V], labels, factors of the logits and kept sets."""


def exact_output(  # noqa: PLR0913 - those of all ways to compute it
    hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor, token_loss: TokenLoss | None,
    chosen: KeptColumns | None, *, temperatures: Tensor, kept: KeptColumns | None,
    group: dist.ProcessGroup | None, chunk_size: int, values: Values | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return what `policy_output` does (policy_output.py).

    Args:
        hidden: [N, H], inputs of the output layer.
        project: the output layer as the engine computes it, [c, H] to the logits [c, V].
        labels: int64 [N].
        temperatures: float32 [N], which divide the logits.
        token_loss: the loss, where it is a sum over tokens.
        chosen: tokens of a teacher for each row; their log-probs are the ordinary ones.
        values: how the engine computes log-probs; exact arithmetic where it is left out."""
    of_engine = values or _logprobs_and_entropy

    def one_chunk(rows: Tensor, targets: Tensor, scale: Tensor, *sets: Tensor) -> tuple[Tensor, Tensor]:
        of_rows = KeptColumns(*sets) if sets else None

        def exact(logits: Tensor) -> tuple[Tensor, Tensor]:
            return of_engine(logits, targets, scale, of_rows)

        def ordinary(logits: Tensor) -> tuple[Tensor, Tensor]:
            return logprobs_of_logits(logits, targets, scale, of_rows, None)

        logprobs, entropy = with_gradient(exact, ordinary, project(rows))
        return logprobs, entropy

    parts = hidden, labels, temperatures.reciprocal(), *(kept or ())
    logprobs, entropy = in_chunks(one_chunk, parts, chunk_size)
    if token_loss is not None:
        loss = token_loss(logprobs, entropy, slice(0, len(logprobs)))
        return loss, logprobs.detach(), entropy.detach()
    if chosen is None:
        return logprobs, entropy
    *_, of_chosen = label_and_chosen_logprobs(
        hidden, project, labels, chosen, temperatures=temperatures, group=group, chunk_size=chunk_size
    )
    return logprobs, entropy, of_chosen


def _logprobs_and_entropy(
    logits: Tensor, labels: Tensor, scale: Tensor, kept: KeptColumns | None
) -> tuple[Tensor, Tensor]:
    scaled = logits * scale[:, None]
    largest, log_total = largest_and_log_total(scaled)
    label = scaled.gather(-1, labels[:, None])
    logprobs = label - largest - log_total
    of_all = scaled - largest - log_total
    entropy = -torch.linalg.vecdot(exp(of_all), of_all)  # entropy is only shown: the last bit may differ
    if kept is not None:
        columns, here = columns_here(kept, scaled.shape[-1])
        of_kept = scaled.gather(-1, columns).masked_fill(~here, -torch.inf)
        has_set = here.any(-1, keepdim=True)
        # a row without a set takes the logarithm of a sum of nothing, which is not used
        of_set = torch.where(has_set, of_kept, 0.0)
        largest_kept, log_total_kept = largest_and_log_total(of_set)
        logprobs = torch.where(has_set, label - largest_kept - log_total_kept, logprobs)
    return logprobs[:, 0], entropy


LOGITS_BYTES = 2 * 2**30 if torch.cuda.is_available() else 4 * 2**20
"""Bytes of logits in memory at a time, counted as float32; longer packs are processed in chunks. On a CPU
it is the size of its caches, so that passes over the logits are quick."""
LEAST_ROWS = 256
"""Least rows of logits at a time: matrix products of fewer rows are slow."""


def chunk_rows(columns: int, *, exact: bool = False) -> int:
    """Return how many rows of logits are alive at a time, of a rank that has so many columns."""
    bytes_each = 16 if exact else 4  # exact logits are float64 at first
    return max(LEAST_ROWS, LOGITS_BYTES // (bytes_each * columns))


def policy_output(  # noqa: PLR0913 - what both backends know
    hidden: Tensor, weight: Tensor, batch: MicroBatch, token_loss: TokenLoss | None, top: int, *,
    first_label: int = 0, largest_part: int | None = None, group: dist.ProcessGroup | None = None,
    exact: bool = False, kernels: SglangKernels | None = None, cap: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the loss over the trained tokens, and without gradient their log-probabilities and entropy.

    Without a loss, log-probabilities and entropy only, which then carry gradient; all float32 [N], and
    behind them float32 [N, K + 1] of a teacher's tokens where the batch has these. With `top`, only the
    ids [N, top] and log-probabilities [N, top + 1] of the likeliest tokens.

    Args:
        hidden: [U, H], of the tokens that are computed, in the order of the micro-batch.
        weight: [v, H], this rank's part of the output layer.
        batch: this rank's share of the micro-batch.
        token_loss: the loss, where it is a sum over tokens.
        top: number of likeliest tokens; 0 asks for none.
        first_label: token of the first row of `weight`.
        largest_part: rows of the rank that has the most, so that all take as many chunks; `None` is those of
            `weight`.
        group: tensor-parallel ranks that share the vocabulary; `None` is one rank.
        exact: compute in exact arithmetic, of a vocabulary that is on one rank.
        kernels: compute with these, of a vocabulary that is on one rank.
        cap: bound on the magnitude of logits, in ordinary arithmetic; `None` is none."""
    rows, labels = hidden.index_select(0, batch.predicting), batch.labels.index_select(0, batch.trained)
    chunk_size = chunk_rows(largest_part or len(weight), exact=exact)
    temperatures = batch.of_trained("temperatures")
    project = partial(exact_linear if exact else F.linear, weight=weight)
    if kernels is not None:
        project = partial(sglang_linear, kernels, weight=weight)
    elif cap is not None:
        project = partial(_capped_linear, weight=weight, cap=cap)
    shared: dict[str, Any] = {"temperatures": temperatures, "group": group, "chunk_size": chunk_size}
    if top:
        return top_tokens(rows, project, top, first=first_label, **shared)
    kept = None if batch.kept is None else batch.kept.index_select(0, batch.trained)
    shared["kept"] = kept_columns(kept, first_label)
    labels = labels - first_label
    taught = batch.teacher_token_ids
    chosen = kept_columns(None if taught is None else taught.index_select(0, batch.trained), first_label)
    if exact:
        return exact_output(rows, project, labels, token_loss, chosen, **shared)
    if kernels is not None:
        return exact_output(
            rows, project, labels, token_loss, chosen, values=partial(_of_server, kernels), **shared
        )
    if token_loss is not None:
        return output_layer_loss(rows, weight, labels, token_loss, cap=cap, **shared)
    if chosen is None:
        return label_logprobs(rows, project, labels, **shared)
    return label_and_chosen_logprobs(rows, project, labels, chosen, **shared)


def _capped_linear(rows: Tensor, weight: Tensor, cap: float) -> Tensor:
    return capped(F.linear(rows, weight), cap)


def _of_server(
    kernels: SglangKernels, logits: Tensor, labels: Tensor, scale: Tensor, kept: KeptColumns | None
) -> tuple[Tensor, Tensor]:
    if kept is not None:
        raise ConfigError("model.numerics=sglang has no kept sets: set sampling.keep_masks=false")
    return logprobs_and_entropy(kernels, logits, labels, scale)
