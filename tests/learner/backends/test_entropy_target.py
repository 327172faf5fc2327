"""The entropy bonus is adapted to a target, whatever the ranks, and goes on where it was after a resume."""

from functools import cache

import pytest
from pydantic import ValidationError

from learner.algorithms.entropy_bonus import EntropyBonus
from learner.algorithms.losses.objective import Objective
from learner.backends.megatron.core.process_groups import divide_world
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.algorithm import EntropyTargetConfig
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest
from tests.learner.tiny import hf_state, random_samples, tiny_model

TARGET = EntropyTargetConfig(nats=2.0, coef_step=0.1, largest_coef=0.25)


def learner_with(nats: float, entropy_coef: float = 0.0) -> LearnerConfig:
    target = EntropyTargetConfig(nats=nats, coef_step=0.1, largest_coef=0.25)
    return LearnerConfig(entropy_target=target, entropy_coef=entropy_coef)


def test_the_weight_by_hand():
    bonus, used = EntropyBonus(0.0), []
    for entropy in (1.0, 1.0, 1.0, 3.0, 1.0, 3.0, 3.0, 3.0, 3.0, 1.0):
        used.append(bonus.used_coef)
        bonus = bonus.after(entropy, TARGET)
    # up by 0.1 to at most 0.25, down from there, and nothing in the update after one above the target
    assert used == pytest.approx([0.0, 0.1, 0.2, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0])
    assert bonus == EntropyBonus(0.1, True)
    assert EntropyBonus.restored(bonus.saved()) == bonus


def trained(trainer: Trainer, learner: LearnerConfig, steps: range) -> list[tuple[float, float]]:
    found = []
    for step in steps:
        batches = pack(random_samples([9, 17, 20], seed=step), 40)
        result = trainer.train_step(batches, Objective.of(learner), policy_version=3)
        found.append((result.diagnostics["entropy_coef"], result.grad_norm))
    return found


def new_trainer() -> Trainer:
    model = tiny_model()
    return Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-3))


def test_the_bonus_grows_below_the_target_and_is_that_of_a_constant_weight():
    learner = learner_with(nats=100.0, entropy_coef=0.05)
    [(first, norm), *rest] = trained(new_trainer(), learner, range(4))
    assert [first, *(coef for coef, _ in rest)] == pytest.approx([0.05, 0.15, 0.25, 0.25])
    constant = Objective.of(LearnerConfig(entropy_coef=0.05))
    batches = pack(random_samples([9, 17, 20], seed=0), 40)
    assert new_trainer().train_step(batches, constant, policy_version=3).grad_norm == norm


def test_above_the_target_there_is_no_bonus():
    coefs = [coef for coef, _ in trained(new_trainer(), learner_with(nats=1e-3, entropy_coef=0.2), range(3))]
    assert coefs == [0.2, 0.0, 0.0]


@pytest.mark.slow
def test_the_weight_goes_on_after_a_resume(tmp_path):
    learner = learner_with(nats=100.0)
    whole = trained(new_trainer(), learner, range(4))
    stopped = new_trainer()
    trained(stopped, learner, range(2))
    save_checkpoint(stopped, tmp_path, 2, {}, keep=1)
    resumed = new_trainer()
    load_checkpoint(resumed, latest(tmp_path))
    assert trained(resumed, learner, range(2, 4)) == whole[2:]


LENGTHS, UPDATES = [9, 17, 20, 5], 6
LAYOUTS = {"dp2": {}, "tp2": {"tensor": 2}, "pp2": {"pipeline": 2}, "cp2": {"context": 2}}


def adapted(nats: float, layout: dict[str, int]) -> tuple[list[tuple[float, float]], EntropyBonus | None]:
    """Return entropy and weight of each update, and what a checkpoint would keep; on a rank of a world."""
    divide_world(ParallelConfig(**layout))
    model = tiny_model()
    config, parallel = OptimizerConfig(lr=1e-2), ParallelConfig(**layout)
    trainer = Trainer(model.config, hf_state(model), config, parallel=parallel)
    rank, ranks = trainer.data_parallel_group.rank(), trainer.data_parallel_group.size()
    found = []
    for step in range(UPDATES):
        own = random_samples(LENGTHS, seed=step)[rank::ranks]
        result = trainer.train_step(pack(own, 40), Objective.of(learner_with(nats, 0.1)), policy_version=3)
        found.append((result.diagnostics["entropy_nats"], result.diagnostics["entropy_coef"]))
    return found, trainer.counts.entropy_bonus


@cache
def of_one_rank() -> tuple[float, list[tuple[float, float]], EntropyBonus | None]:
    """A target that some updates are above and some below, and what it leads to."""
    without = sorted(entropy for entropy, _ in adapted(100.0, {})[0])
    nats = (without[UPDATES // 2 - 1] + without[UPDATES // 2]) / 2
    return nats, *adapted(nats, {})


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_of_a_layout_adapts_the_weight_as_one_rank_does(worlds, name):
    nats, updates, bonus = of_one_rank()
    assert len({coef for _, coef in updates}) > 2  # it has gone up and down
    assert len({entropy < nats for entropy, _ in updates}) == 2
    for found, kept in worlds.run(2, adapted, nats, LAYOUTS[name]):
        assert found == [pytest.approx(update, abs=1e-5) for update in updates]
        assert kept == bonus


def test_an_update_that_is_skipped_leaves_the_weight_alone():
    trainer, learner = new_trainer(), learner_with(nats=100.0)
    trained(trainer, learner, range(1))
    before = trainer.counts.entropy_bonus
    sample = random_samples([9])[0].with_streams(advantages=float("nan"))
    assert trainer.train_step(pack([sample], 40), Objective.of(learner), policy_version=3).skipped
    assert trainer.counts.entropy_bonus == before


def test_a_weight_that_begins_above_its_bound_is_refused():
    with pytest.raises(
        ValidationError, match=r"entropy_coef=0.3 is above .*largest_coef=0.25: lower the first"
    ):
        learner_with(nats=1.0, entropy_coef=0.3)
