"""Agreements of the data-parallel ranks before each step: number of micro-batches, counts, sums, digest."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from learner.data.batches import DIGESTS, StepBatch
from learner.data.outcomes import joined as joined_outcomes
from learner.data.packing import MicroBatch, empty_micro_batch
from learner.distributed.exact_sums import Rows, SumsOverRanks, exact_sums, joined
from learner.distributed.process_group import device

SUMS = (
    "trajectories", "tokens", "untrainable", "untrusted", "groups", "equal_groups",
    "staleness_sum", "queued_sum", "completed", "cut_off_tokens",
)  # fmt: skip
"""Counts of a batch that ranks add up."""


def equally_many(micro_batches: Sequence[MicroBatch], group: dist.ProcessGroup) -> list[MicroBatch]:
    """Append empty micro-batches until this rank has as many as any rank of `group`, and at least one.
    Collectives run in every micro-batch, so ranks with different numbers of them would wait for ever."""
    most = torch.tensor(max(1, len(micro_batches)), device=device())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
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
    parts = [replace(batch, samples=[])] * group.size()
    if len(parts) > 1:
        dist.all_gather_object(parts, parts[0], group=group)
    return replace(
        batch,
        **{name: sum(getattr(part, name) for part in parts) for name in SUMS},
        staleness_max=max(part.staleness_max for part in parts),
        digest=sum(part.digest for part in parts) % DIGESTS,
        outcomes=joined_outcomes([part.outcomes for part in parts]),
    )
