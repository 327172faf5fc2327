"""A critic is part of the run's checkpoint: training goes on with it to the bit, or says why it cannot."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bus.errors import ConfigError
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import load_checkpoint, save_checkpoint, start_checkpoint
from learner.config.advantage import GAEAdvantage
from learner.config.critic import CriticConfig, CriticOptimizerConfig
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.batches import recorded_samples
from learner.data.packing import pack
from learner.step.rl_step import train_on
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.backends.trained_groups import groups_of
from tests.learner.critics import source_of, tiny_critic
from tests.learner.division import divide_world
from tests.learner.tiny import hf_state, tiny_model

CRITIC = CriticConfig(level="turn", optimizer=CriticOptimizerConfig(lr=5e-3, warmup_steps=4))
LEARNER = LearnerConfig(advantage=GAEAdvantage(), critic=CRITIC)
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4)


def trainer_of(*, seed: int = 0, dtype: torch.dtype = torch.float32, layout=None, **changes) -> Trainer:
    policy = tiny_model(seed=seed)
    critic = source_of(tiny_critic(seed=seed + 5, **changes), CRITIC)
    parallel = ParallelConfig(**(layout or {}))
    return Trainer(policy.config, hf_state(policy), OPTIMIZER, dtype=dtype, parallel=parallel, critic=critic)


def train(trainer: Trainer, steps) -> list[object]:
    """What each step did, and what the critic thinks then."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    found: list[object] = []
    for step in steps:
        own = groups_of("", step)[rank::ranks]
        found.append(train_on(trainer, own, [1.0] * len(own), LEARNER, step=step + 1, policy_version=step)[1])
    batches = pack(recorded_samples(groups_of("", 7)), 1000)
    return [*found, *(values[batch.loss_mask].tolist() for values, batch in zip(
        trainer.critic.values(batches), batches, strict=True
    ))]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policy_and_critic_go_on_as_if_they_had_not_stopped(tmp_path: Path, dtype, held_writer):
    first = trainer_of(dtype=dtype)
    train(first, range(2))
    pending = start_checkpoint(first, tmp_path, 2, {}, keep=1)
    uninterrupted = train(first, range(2, 4))
    held_writer.set()
    pending.finish()
    second = trainer_of(seed=1, dtype=dtype)
    train(second, range(1))
    load_checkpoint(second, latest_checkpoint(tmp_path))
    assert second.critic.updates_done == 2
    assert train(second, range(2, 4)) == uninterrupted


@pytest.mark.slow
def test_what_does_not_belong_together_is_refused_by_name(tmp_path: Path):
    policy = tiny_model()
    alone = Trainer(policy.config, hf_state(policy), OPTIMIZER)
    save_checkpoint(alone, tmp_path / "alone", 1, {}, keep=1)
    with pytest.raises(ConfigError, match=r"has no critic.* set learner\.advantage\.type"):
        load_checkpoint(trainer_of(), latest_checkpoint(tmp_path / "alone"))
    save_checkpoint(trainer_of(), tmp_path / "both", 1, {}, keep=1)
    with pytest.raises(ConfigError, match=r"another critic: intermediate is 96, not 48; keep"):
        load_checkpoint(trainer_of(intermediate_size=48), latest_checkpoint(tmp_path / "both"))
    with torch.no_grad():
        alone.chunks[0].decoder.final_layernorm.weight.zero_()
    load_checkpoint(alone, latest_checkpoint(tmp_path / "both"))  # the critic stays behind
    assert torch.equal(alone.export()["model.norm.weight"], policy.model.norm.weight)


def half(
    saved: str | None, into: str | None, steps: tuple[int, ...], layout: dict[str, object]
) -> list[object]:
    """Train these steps from a checkpoint, or from the beginning; on a rank of a world."""
    divide_world(ParallelConfig(**layout))
    trainer = trainer_of(layout=layout)
    if saved is not None:
        load_checkpoint(trainer, latest_checkpoint(Path(saved)))
    found = train(trainer, steps)
    if into is not None:
        save_checkpoint(trainer, Path(into), max(steps) + 1, {}, keep=1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{}, pytest.param({"tensor": 2, "sequence": True}, marks=pytest.mark.nightly), {"pipeline": 2}],
    ids=str,
)
def test_another_layout_of_ranks_goes_on_where_the_first_stopped(worlds, tmp_path: Path, layout):
    uninterrupted = half(None, None, (0, 1, 2), {})
    worlds.run(2, half, None, str(tmp_path / "two"), (0, 1), layout)
    half(None, str(tmp_path / "one"), (0, 1), {})
    alone = half(str(tmp_path / "two"), None, (2,), {})
    [together, _] = worlds.run(2, half, str(tmp_path / "one"), None, (2,), layout)
    for found in (alone, together):
        assert found[0].loss == pytest.approx(uninterrupted[2].loss, rel=1e-4, abs=1e-5)
        np.testing.assert_allclose(found[1], uninterrupted[3], rtol=1e-4, atol=1e-4)
