"""Log-probabilities of labels that are those an engine records, to the bit: of the embedded engine in exact
arithmetic, or of SGLang by its own kernels.

The logits of all trained tokens are computed chunk by chunk, and again in the backward pass where there are
several chunks. Gradients are those of the ordinary output layer (output_layer.py).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.output.chosen_tokens import label_and_chosen_logprobs
from learner.backends.output.output_layer import (
    KeptColumns,
    TokenLoss,
    columns_here,
    in_chunks,
    logprobs_of_logits,
)
from storage.exact_arithmetic.elementary import exp
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
        token_loss: the loss, where it is a sum over tokens.
        chosen: tokens of a teacher for each row; their log-probs are the ordinary ones.
        temperatures: float32 [N], which divide the logits.
        kept: what each label was drawn from; `None` is the whole vocabulary for all.
        group: ranks that share the vocabulary, of which there is one.
        chunk_size: rows of logits alive at a time.
        values: how the engine computes log-probs; exact arithmetic where it is left out.
    """
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
    entropy = -torch.linalg.vecdot(exp(of_all), of_all)  # it is only shown: its last bit may be another
    if kept is not None:
        columns, here = columns_here(kept, scaled.shape[-1])
        of_kept = scaled.gather(-1, columns).masked_fill(~here, -torch.inf)
        has_set = here.any(-1, keepdim=True)
        # a row without a set takes the logarithm of a sum of nothing, which is not used
        of_set = torch.where(has_set, of_kept, 0.0)
        largest_kept, log_total_kept = largest_and_log_total(of_set)
        logprobs = torch.where(has_set, label - largest_kept - log_total_kept, logprobs)
    return logprobs[:, 0], entropy
