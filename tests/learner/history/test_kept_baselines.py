"""Baselines that an advantage estimator keeps are those of the step, however often the learner is killed."""

import asyncio
from contextlib import ExitStack, closing

import pytest

from learner.checkpoint.commit import read_extra
from learner.config.advantage import OverlongPenalty, RAEAdvantage
from learner.config.frozen_policies import ReferenceConfig
from learner.history.retrain import retrain_steps, summary
from learner.initial.initial import prepare
from storage.disk import checkpoints
from storage.store.replay import ReplayStore
from tests.learner.mini_run import MiniRun, in_one_process, past_run
from tests.storage.serving import SHARDS

pytestmark = [pytest.mark.slow, pytest.mark.nats]
CHANGES = {
    "advantage": RAEAdvantage(decay=0.9),
    "overlong": OverlongPenalty(longest_tokens=12, margin_tokens=8),
    "reference": ReferenceConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1"),
}


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> MiniRun:
    """Six steps; the learner was killed after the third, and had a checkpoint of the second."""
    with pytest.MonkeyPatch.context() as patch:
        in_one_process(patch)
        directory = tmp_path_factory.mktemp("past")
        return asyncio.run(past_run(directory, steps=6, killed_after=3, **CHANGES))


def retrained(run: MiniRun, from_step: int):
    settings = run.settings(**CHANGES)
    with ExitStack() as stack:
        stores = [
            stack.enter_context(closing(ReplayStore.open(run.directory / str(n), writable=False)))
            for n in range(SHARDS)
        ]
        initial = prepare(settings, run.demonstrations)
        return list(retrain_steps(settings, initial, stores, from_step=from_step, to_step=6))


@pytest.mark.parametrize("from_step", [0, 4])
def test_steps_are_trained_again_bit_for_bit_from_the_beginning_and_from_a_checkpoint(past, from_step):
    report = summary(retrained(past, from_step))
    assert (report["batches_equal"], report["first_step_that_differs"]) == (6 - from_step, None)


def test_every_checkpoint_has_the_baselines_of_its_step(past):
    kept = [
        read_extra(checkpoints.directory(past.directory / "checkpoints", step))["baselines"]
        for step in (4, 6)
    ]
    assert all(baselines.keys() == {"default/solver"} for baselines in kept)
    assert 0.0 != kept[0]["default/solver"] != kept[1]["default/solver"]
