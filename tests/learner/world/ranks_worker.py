"""Takes one step of a world whose ranks have unequal shares, by the real division."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bus.trajectory import Trajectory
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.checkpoint.newest_checkpoint import newest_whole
from learner.config.batch import BatchConfig
from learner.config.correction import SecondMoment
from learner.config.frozen_policies import ReferenceConfig
from learner.config.learner import LearnerConfig
from learner.config.loss import ClipCovLoss, KLCovLoss, PPOClipLoss
from learner.config.optimizer import OptimizerConfig
from learner.distributed.process_group import gathered
from learner.host_memory.copies import host_tensors
from learner.logprobs.logprobs import recorded_logprobs
from learner.publication.host_copy import HostCopy, copy_weights
from learner.step.rl_step import train_on
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.factories import make_trajectory
from tests.learner.tiny import VOCAB, tiny_model

LOSSES = {
    "tis": {},
    "ppo_clip": {"loss": PPOClipLoss()},
    "decoupled": {
        "loss": PPOClipLoss(centre="proximal"),
        "reference": ReferenceConfig(kl_coef=0.2),
        "batch": BatchConfig(tokens_per_micro_batch=16, logprob_tokens_per_micro_batch=30, updates=2),
    },
    "second moment": {
        "rejection": SecondMoment(largest_moment=9.0),
        "batch": BatchConfig(tokens_per_micro_batch=16, updates=2),
    },
    "kl-cov": {"loss": KLCovLoss(picked_fraction=0.2), "rejection": SecondMoment(largest_moment=9.0)},
    "clip-cov": {"loss": ClipCovLoss(picked_fraction=0.1, lowest_covariance=0.0)},
}
FIGURES = ("rejected_fraction", "clipped_fraction", "importance_ratio_p99", "importance_ratio_max")
SHARES = {1: [[0, 1, 2, 3]], 2: [[0, 1, 2, 3], []], 3: [[0, 3], [], [1, 2]]}
"""Groups of each rank, by the number of ranks; one has none."""


def group(number: int) -> list[Trajectory]:
    """Two siblings whose lengths, rewards and staleness depend on the group."""
    siblings = [
        make_trajectory(
            number, n, tokens=6 + 5 * n * number, policy_version=number, reward=float(n * (number % 3))
        )
        for n in range(2)
    ]
    return [
        replace(
            sibling,
            token_ids=sibling.token_ids % VOCAB,
            turns=tuple(turn._replace(temperature=0.7) for turn in sibling.turns),
        )
        for sibling in siblings
    ]


def step(loss: str) -> dict[str, list[float] | str]:
    """Train once; return what is the same however many ranks share the step."""
    model = tiny_model()
    trainer = Trainer(model.config, model.state_dict(), OptimizerConfig(lr=1e-3))
    trainer.frozen.load("reference", model.config, tiny_model(seed=1).state_dict(), Path("elsewhere"))
    ranks = trainer.data_parallel_group
    groups = [group(n) for n in SHARES[ranks.size()][ranks.rank()]]
    learner = LearnerConfig(**{"batch": BatchConfig(tokens_per_micro_batch=16), **LOSSES[loss]})
    weights = [0.5 for _ in groups]
    batch, result = train_on(trainer, groups, weights, learner, step=1, policy_version=4)
    after = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()]).double()
    numbers = [
        result.loss, result.grad_norm, result.tokens, result.diagnostics["entropy_nats"],
        *(result.diagnostics.get(name, 0.0) for name in FIGURES),
        batch.trajectories, batch.tokens, batch.reward_mean, batch.staleness_max, batch.staleness_mean,
        batch.response_tokens_mean, float(after.norm()), float(after.abs().sum()),
    ]  # fmt: skip
    return {"numbers": numbers, "batch_xxh3": batch.xxh3()}


def recorded() -> dict[str, list[float]]:
    """Return what this rank records of the step, by trajectory."""
    model = tiny_model()
    trainer = Trainer(model.config, model.state_dict(), OptimizerConfig(lr=1e-3))
    ranks = trainer.data_parallel_group
    groups = [group(n) for n in SHARES[ranks.size()][ranks.rank()]]
    found = recorded_logprobs(trainer, groups, LearnerConfig(), step=1)
    return {name: logprobs.tolist() for name, logprobs in found.items()}


def random_numbers(checkpoints: Path) -> list[float]:
    """Return what this rank would have drawn after its checkpoint, less what it draws after it resumed; 0
    each."""
    model = tiny_model()
    trainer = Trainer(model.config, model.state_dict(), OptimizerConfig())
    torch.manual_seed(dist.get_rank())
    save_checkpoint(trainer, checkpoints, 1, {}, keep=1)
    expected = torch.rand(3)
    load_checkpoint(trainer, latest_checkpoint(checkpoints))
    return (torch.rand(3) - expected).tolist()


def whole(root: Path) -> str:
    """Return which checkpoint this rank goes on from after another rank's share of the newest was damaged."""
    model = tiny_model()
    trainer = Trainer(model.config, model.state_dict(), OptimizerConfig())
    for step in (1, 2):
        save_checkpoint(trainer, root, step, {}, keep=2)
    if dist.get_rank() == 0:
        for path in latest_checkpoint(root).glob("__1_*.distcp"):
            path.write_bytes(bytes(path.stat().st_size))
    dist.barrier()
    return str(newest_whole(root).name)


def copies() -> bool:
    """Tell whether the ranks together have all weights on their hosts each time."""
    model = tiny_model()
    trainer = Trainer(model.config, model.state_dict(), OptimizerConfig())
    expected = host_tensors(model.state_dict())
    host, thread = HostCopy(torch.float32), ThreadPoolExecutor(1)
    for _ in range(3):
        mine = asyncio.run(copy_weights(host, trainer, thread)).wait()
        of_ranks = gathered({name: tensor.words for name, tensor in mine.items()})
        state = {name: words for of_rank in of_ranks for name, words in of_rank.items()}
        if state.keys() != expected.keys() or any(
            not np.array_equal(words, expected[name].words) for name, words in state.items()
        ):
            return False
    return True


def found_by_rank(directory: Path) -> dict[str, object]:
    """Return all that this rank finds."""
    return {loss: step(loss) for loss in LOSSES} | {
        "random": random_numbers(directory / "random"),
        "copied": copies(),
        "recorded": recorded(),
        "whole": whole(directory / "whole"),
    }
