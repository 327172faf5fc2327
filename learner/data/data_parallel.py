"""Agreements of the data-parallel ranks before each step: number of micro-batches, counts, sums, digest."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from learner.data.batches import DIGESTS, StepBatch
from learner.data.packing import MicroBatch, empty_micro_batch
from learner.distributed.exact_sums import Rows, SumsOverRanks, exact_sums, joined
from learner.distributed.process_group import device

WORDS = range(0, 128, 32)
"""First bits of the 32-bit words of a digest; a million such words add up exactly in float64."""


def equally_many(micro_batches: Sequence[MicroBatch], group: dist.ProcessGroup) -> list[MicroBatch]:
    """Append empty micro-batches until this rank has as many as any rank of `group`, and at least one.

    Collectives run in every micro-batch, so ranks with different numbers of them would wait for ever.
    """
    [most] = _reduced([max(1, len(micro_batches))], dist.ReduceOp.MAX, group)
    missing = int(most) - len(micro_batches)
    return [*micro_batches, *(empty_micro_batch() for _ in range(missing))]


def sums_over_ranks(group: dist.ProcessGroup) -> SumsOverRanks:
    """Return what adds up rows of numbers over the ranks of `group`, to the same bits however many there
    are."""

    def sums(rows: Rows) -> dict[str, NDArray[np.float64]]:
        parts: list[Rows] = [rows] * group.size()
        if len(parts) > 1:
            dist.all_gather_object(parts, rows, group=group)
        return exact_sums(joined(parts))

    return sums


def of_all_ranks(batch: StepBatch, group: dist.ProcessGroup) -> StepBatch:
    """Return this rank's samples with the counts and the digest of all ranks of `group`."""
    names = (
        "trajectories",
        "tokens",
        "untrainable",
        "untrusted",
        "reward_sum",
        "groups",
        "equal_groups",
        "zero_rewards",
        "staleness_sum",
        "queued_sum",
        "completed",
        "cut_off_tokens",
        "response_tokens",
    )
    sums = _reduced([getattr(batch, name) for name in names], dist.ReduceOp.SUM, group)
    words = _reduced([batch.digest >> shift & 0xFFFFFFFF for shift in WORDS], dist.ReduceOp.SUM, group)
    [staleness_max] = _reduced([batch.staleness_max], dist.ReduceOp.MAX, group)
    return replace(
        batch,
        staleness_max=int(staleness_max),
        digest=sum(int(word) << shift for word, shift in zip(words, WORDS, strict=True)) % DIGESTS,
        **{name: type(getattr(batch, name))(total) for name, total in zip(names, sums, strict=True)},
    )


def _reduced(values: Sequence[float], how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> list[float]:
    reduced = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(reduced, how, group=group)
    return [float(value) for value in reduced]
