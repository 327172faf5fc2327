"""Ranks that share a model, of which one asks the teachers behind servers."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from bus.requests import GroupRef
from bus.trajectory import Groups
from learner.backends.megatron.trainer import Trainer
from learner.config.batch import BatchConfig
from learner.config.frozen_policies import TeacherConfig
from learner.config.learner import LearnerConfig
from learner.config.parallel import ParallelConfig
from learner.data.top_tokens import TopTokens
from learner.distributed.process_group import Peers
from learner.logprobs.served_teachers import TeacherAnswers
from learner.world.rank import Rank
from tests.learner.division import divide_world
from tests.learner.logprobs.served_model import ServedModel
from tests.learner.logprobs.served_steps import OPTIMIZER, groups_of, stepped, teacher
from tests.learner.mini_run import MiniRun
from tests.learner.tiny import hf_state, tiny_model

pytestmark = pytest.mark.slow


def shared(numbers: list[int]) -> tuple[bool, int]:
    """Tell whether this rank asks, and which rank's answers it has."""
    rank = torch.distributed.get_rank()
    peers = Peers(numbers[rank], 30.0)
    tops = {"teacher": [TopTokens(np.full((3, 2), rank, np.int32), np.zeros((3, 3), np.float32))]}
    [top] = peers.from_first(TeacherAnswers(top_tokens=tops)).top_tokens["teacher"]
    return peers.is_first, int(top.token_ids[0, 0])


def test_one_of_the_ranks_that_share_a_model_asks_for_all(worlds):
    assert worlds.run(3, shared, [0, 0, 0]) == [(True, 0), (False, 0), (False, 0)]
    assert worlds.run(3, shared, [1, 0, 1]) == [(True, 0), (True, 1), (False, 0)]
    assert worlds.run(3, shared, [2, 0, 1]) == [(True, 0), (True, 1), (True, 2)]


class Given:
    """A reader that has the groups."""

    async def fetch(self, _: object) -> Groups:
        return groups_of()


def first_step(url: str, directory: Path) -> tuple[float, float, str, str]:
    """Loss and gradient norm of a step that this rank takes with half of the model, and what it said that it
    waits for before and after."""
    parallel, policy = ParallelConfig(tensor=2), tiny_model(seed=0)
    divide_world(parallel)
    trainer = Trainer(policy.config, hf_state(policy), OPTIMIZER, parallel=parallel)
    run = MiniRun(None, directory, None, directory)  # of which only the settings are asked for
    settings = run.settings(teacher=TeacherConfig(url=url, coef=0.5))
    refs = tuple(GroupRef(shard=0, lease_id=n) for n in range(2))

    async def step() -> tuple[float, float, str, str]:
        rank.fetch(1, [refs], "")
        await asyncio.sleep(0)  # the reader answers at once, the teacher not before the event loop looks
        said = rank.waits_for_teachers(1)
        _, result = await rank.train(1, 1, {})
        return result.loss, result.grad_norm, said, rank.waits_for_teachers(1)

    with ThreadPoolExecutor(1) as thread:
        rank = Rank(trainer, settings, reader=Given(), demonstrations=None, thread=thread)
        return asyncio.run(step())


def test_ranks_that_share_a_model_train_on_what_one_was_answered(worlds, tmp_path):
    with ServedModel(teacher()) as server:
        answers = worlds.run(2, first_step, server.url, tmp_path)
    assert len(server.bodies) == 6  # one for each trajectory
    batch = BatchConfig(tokens_per_micro_batch=32)
    held = LearnerConfig(teacher=TeacherConfig(path=Path("a directory"), coef=0.5), batch=batch)
    [(loss, norm, _), _], *_ = stepped(held)
    np.testing.assert_allclose([found[:2] for found in answers], [(loss, norm)] * 2, rtol=2e-5, atol=2e-6)
    assert [found[2:] for found in answers] == [(f"the teacher at {server.url}", ""), ("", "")]
