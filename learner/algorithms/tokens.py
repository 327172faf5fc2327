"""Tells what a loss sees of the N tokens that it is computed over."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.data.streams import STREAMS
from learner.distributed.process_group import gathered_columns

EVERY_ROW = slice(None)
LARGEST_DISTANCE = 1e4
"""Log ratios whose square is needed are cut off at this many nats, which no engine's log-probs differ by: a
float32 must hold the square of their sum over a sequence."""
LARGEST_LOG_RATIO = 20.0
"""Log ratios are cut off at this many nats: a float32 exponential must stay finite, since inf * 0 is NaN in
the gradient of a clipped token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTokens:
    """N trained tokens of one micro-batch, or of a slice of it where the loss is separable over tokens."""

    logprobs: Tensor
    """float32 [N] nats, current policy; carries gradient."""
    entropy: Tensor
    """float32 [N] nats, of the distribution that the current policy gives the token; carries gradient."""
    labels: Tensor
    """int64 [N], the tokens' ids."""
    sequence: Tensor
    """int64 [N], which sequence of the micro-batch a token belongs to."""
    sequences: int
    """Number of sequences in the micro-batch."""
    positions: Tensor
    """int64 [N], each token's place among the trained and untrained tokens of its sequence, from 0."""
    streams: Mapping[str, Tensor]
    """[N] each, all streams of learner/data/streams.py by name."""
    context_group: dist.ProcessGroup | None = None
    """Ranks that share the tokens of each sequence, if there are several."""
    policy_version: int = 0
    """Version of the weights before the step."""
    top_logprobs: Tensor | None = None
    """float32 [N, K + 1] nats, current policy, of a teacher's likeliest tokens and of all others together;
    carries gradient. None where no token of the micro-batch has such a teacher."""
    teacher_top_logprobs: Tensor | None = None
    """float32 [N, K + 1] nats, the teacher's of the same; -inf for entries that are none."""

    def with_streams(self, **streams: Tensor) -> Self:
        """Return these tokens with other values of some streams."""
        return replace(self, streams={**self.streams, **streams})

    def ratio_to(self, name: str) -> Tensor:
        """Return the current policy over that of the log-probs in stream `name`, [N], with gradient."""
        return (self.logprobs - self.streams[name]).clamp(max=LARGEST_LOG_RATIO).exp()

    def bounded_log_ratio_to(self, name: str) -> Tensor:
        """Return the logarithm of that ratio, of which squares are finite, [N] nats, with gradient."""
        return (self.logprobs - self.streams[name]).clamp(-LARGEST_DISTANCE, LARGEST_DISTANCE)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Add up values [N] by sequence, float64 [sequences], over the ranks that share these; with gradient.

        An exponential of the sum turns the rounding of thousands of float32 terms into an error of the loss.
        """
        sums = torch.zeros(self.sequences, dtype=torch.float64, device=values.device)
        sums = sums.index_add(0, self.sequence, values.double())
        if self.context_group is None or self.context_group.size() == 1:
            return sums
        total: Tensor = _SumOverRanks.apply(sums, self.context_group)  # type: ignore[no-untyped-call]
        return total

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return the mean of values [N] over each sequence's trained tokens, float64 [sequences]; 0 without
        any."""
        counts = self.sequence_sum(torch.ones_like(values, requires_grad=False))
        return self.sequence_sum(values) / counts.clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTokens:
    """Says what is known of a micro-batch's trained tokens before the model has seen them."""

    labels: Tensor
    sequence: Tensor
    sequences: int
    positions: Tensor
    streams: Mapping[str, Tensor]
    context_group: dist.ProcessGroup | None
    policy_version: int
    teacher_top_logprobs: Tensor | None = None

    @classmethod
    def of(
        cls, batch: MicroBatch, context_group: dist.ProcessGroup | None = None, *, policy_version: int = 0
    ) -> Self:
        """Pick the tokens at `batch.trained`, with every stream that is declared."""
        return cls(
            labels=batch.labels.index_select(0, batch.trained),
            sequence=batch.sequence_of_token.index_select(0, batch.trained),
            sequences=len(batch.lengths),
            positions=batch.position_ids.index_select(0, batch.trained) + 1,
            streams={name: batch.of_trained(name) for name in STREAMS},
            context_group=context_group,
            policy_version=policy_version,
            teacher_top_logprobs=None
            if batch.teacher_logprobs is None
            else batch.teacher_logprobs.index_select(0, batch.trained),
        )

    def with_logprobs(
        self, logprobs: Tensor, entropy: Tensor, rows: slice = EVERY_ROW, top_logprobs: Tensor | None = None
    ) -> LossTokens:
        """Join `rows` of these tokens with what the model says of them: log-probs [n] and entropies [n], and
        log-probs [n, K + 1] of a teacher's likeliest tokens, if it was asked for these."""
        teacher = self.teacher_top_logprobs
        return LossTokens(
            logprobs=logprobs,
            entropy=entropy,
            labels=self.labels[rows],
            sequence=self.sequence[rows],
            sequences=self.sequences,
            positions=self.positions[rows],
            streams={name: values[rows] for name, values in self.streams.items()},
            context_group=self.context_group,
            policy_version=self.policy_version,
            top_logprobs=top_logprobs,
            teacher_top_logprobs=None if teacher is None else teacher[rows],
        )


class _SumOverRanks(torch.autograd.Function):
    """Sum over a group of which each rank's loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Add up the gradients: every rank's loss has used this rank's values."""
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


OfTokens = Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]]
"""Takes values of tokens, [N] each, and last the sequence of each token [N]; returns weights [N], which
tokens are kept [N], and what to log: sums [], or which tokens are counted [N]."""


def by_sequence(values: Tensor, sequence: Tensor, over: Literal["product", "mean"]) -> Tensor:
    """Add up log values [N] over each token's sequence (the log of their product), or take the mean; float64
    [N]."""
    values = values.double()
    _, number = torch.unique(sequence, return_inverse=True)
    sums = torch.zeros_like(values).index_add(0, number, values)
    if over == "mean":
        sums = sums / torch.zeros_like(values).index_add(0, number, torch.ones_like(values)).clamp(min=1)
    return sums[number]


def over_whole_sequences(
    function: OfTokens, tokens: LossTokens, *values: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Call `function` with the tokens of all ranks that share these sequences, in the order of the text.

    Args:
        function: is called once, with the same arguments on every rank.
        tokens: this rank's tokens. Ranks may have different numbers of them.
        values: [N] each, of this rank's tokens; they carry no gradient.

    Returns what `function` said of this rank's tokens, and this rank's part of its sums and masks."""
    group = tokens.context_group
    if group is None or group.size() == 1:
        return function(*values, tokens.sequence)
    own = torch.stack([tokens.sequence.double(), tokens.positions.double(), *(v.double() for v in values)])
    parts = gathered_columns(own, group)
    sequence, positions, *gathered = torch.cat(parts, dim=1)
    by_position = torch.argsort(positions, stable=True)
    in_text = by_position[torch.argsort(sequence[by_position], stable=True)]
    arguments = [found[in_text].to(value.dtype) for found, value in zip(gathered, values, strict=True)]
    weights, kept, sums = function(*arguments, sequence[in_text].long())
    begin = sum(part.shape[1] for part in parts[: group.rank()])
    mine = torch.argsort(in_text)[begin : begin + own.shape[1]]
    own_sums = {name: value[mine] if value.ndim else value / group.size() for name, value in sums.items()}
    return weights[mine], kept[mine], own_sums
