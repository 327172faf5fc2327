"""Token ids that the model has no embedding of never reach it, where the shard knows no vocabulary."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bus.errors import UnreadableGroupsError
from bus.requests import GroupRef
from bus.trajectory import Trajectory
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.world.rank import Rank
from tests.factories import make_trajectory
from tests.learner.tiny import hf_state, tiny_model
from tests.learner.world.prefetch_settings import settings


class Reading:
    """Reads stored groups, and keeps what was reported of them."""

    def __init__(self, groups: list[list[Trajectory]]) -> None:
        self.groups = groups
        self.reported: list[tuple[int, UnreadableGroupsError]] = []

    async def fetch(self, refs: object) -> list[list[Trajectory]]:
        return self.groups

    async def report_unreadable(self, step: int, error: UnreadableGroupsError, given_to: str) -> None:
        self.reported.append((step, error))


async def test_a_token_beyond_the_vocabulary_is_refused_by_name_and_its_group_replaced(tmp_path: Path):
    model = tiny_model()
    trainer = Trainer(model.config, hf_state(model), OptimizerConfig())
    ids = np.arange(8, dtype=np.int32)
    known = replace(make_trajectory(1), token_ids=ids + (model.config.vocab_size - 8))
    foreign = replace(make_trajectory(2), token_ids=ids + (model.config.vocab_size - 7))
    reading = Reading([[known], [foreign]])
    with ThreadPoolExecutor(1) as thread:
        rank = Rank(trainer, settings(tmp_path, 1), reader=reading, demonstrations=None, thread=thread)
        refs = (GroupRef(lease_id=1, shard=0), GroupRef(lease_id=2, shard=0))
        rank.fetch(3, [refs], "a")
        size = model.config.vocab_size
        with pytest.raises(UnreadableGroupsError, match=f"group 2 has token id {size}, of a vocabulary of"):
            await asyncio.wait_for(rank.fetched(3), 20)
    [(step, error)] = reading.reported
    assert (step, error.lease_ids) == (3, (2,))
