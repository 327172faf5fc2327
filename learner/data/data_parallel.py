"""What the data-parallel ranks of the learner's world agree on before each step."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from learner.data.batches import DIGESTS, StepBatch
from learner.data.packing import MicroBatch, empty_micro_batch
from learner.world.process_group import device

WORDS = range(0, 128, 32)
"""Where the words of a digest begin; as float64 a million of them add up exactly."""


def equally_many(micro_batches: Sequence[MicroBatch], group: dist.ProcessGroup) -> list[MicroBatch]:
    """This rank's micro-batches, then empty ones until it has as many as the rank of `group` with the most.

    Every rank has one at least.
    Ranks that took different numbers of turns could wait for each other for ever.
    """
    [most] = _reduced([max(1, len(micro_batches))], dist.ReduceOp.MAX, group)
    missing = int(most) - len(micro_batches)
    return [*micro_batches, *(empty_micro_batch() for _ in range(missing))]


def of_all_ranks(batch: StepBatch, group: dist.ProcessGroup) -> StepBatch:
    """This rank's samples, with counts and digest of all ranks of `group` together."""
    names = (
        "trajectories",
        "tokens",
        "untrainable",
        "untrusted",
        "reward_sum",
        "staleness_sum",
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
