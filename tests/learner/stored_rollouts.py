"""Rollouts by the embedded engine, as the learner reads them from a shard's files."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.embedded.decoder import BatchedDecoder
from actors.episodes.episode import Episode
from actors.policy.strand import Call, Strand
from actors.rollouts.group import Group
from bus.codec import decode, encode
from bus.trajectory import Trajectory, TrajectoryBatch
from storage.store.segments import Segment, write_segment
from tests.factories import make_lease
from tests.learner.tiny import VOCAB


def stored_rollouts(
    model: PreTrainedModel, directory: Path, samplings: Sequence[Sampling], *, context: int,
    routed_experts: bool = False,
) -> list[Trajectory]:  # fmt: skip
    """A group of two by version 3, each of two turns with `context` tokens before each."""
    path = directory / "segment_00000000"
    write_segment(path, asyncio.run(_rolled_out(model, samplings, context, routed_experts)))
    segment = Segment(path)
    found = [segment.trajectory(row, copied=True) for row in range(2)]
    segment.close()
    return found


async def _rolled_out(
    model: PreTrainedModel, samplings: Sequence[Sampling], context: int, routed_experts: bool
) -> list[Trajectory]:
    decoder = BatchedDecoder(model, slots=8, prefill_tokens=256, seed=1, routed_experts=routed_experts)
    decoder.policy_version = 3
    group = Group(make_lease(0, samples=2, policy_version=3), 1, "tester")
    draw = np.random.default_rng(0)
    for sample in range(2):
        strand = Strand(0, "solver", "default", None)
        for turn in range(2):
            sampling = samplings[2 * sample + turn]
            prompt = [*strand.tokens, *draw.integers(0, VOCAB, context).tolist()]
            known = max(0, len(strand.tokens) - 1) if routed_experts else None
            decoder.submit([GenerationRequest(f"{sample}-{turn}", prompt, sampling, experts_from=known)])
            finished = []
            while not finished:
                finished = decoder.step()
            strand.extend(prompt, finished[0][1], Call(turn, "solver", "default", sampling, True))
        recorded = strand.trajectory(float(sample), turn_rewards={}, reward_components={}, end="completed")
        group.add(sample, Episode((recorded,), metrics={}))
    batches = [decode(encode(batch), TrajectoryBatch) for _, batch, _ in group.unsent()]
    return [trajectory for batch in batches for trajectory in batch.trajectories]
