"""Exchanges of tokens beside the products of layers train as those before and behind them do."""

import pytest
import torch

from learner.backends.megatron.core.linear import OVERLAPPED
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from tests.learner.division import divide_world
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

STEPS = 3
PRODUCTS = {"qwen3": 8, "qwen2": 8, "glm4": 8, "qwen3_moe": 4}
"""Layers whose exchanges overlap, by family: experts exchange their tokens themselves."""
DEAR = pytest.mark.nightly
CASES = [
    pytest.param(2, "qwen3", marks=pytest.mark.slow),
    *(pytest.param(*case, marks=DEAR) for case in ((2, "qwen2"), (2, "glm4"), (2, "qwen3_moe"))),
    *(pytest.param(*case, marks=DEAR) for case in ((4, "qwen3"), (4, "qwen2"))),
]


def trained(ranks: int, family: str) -> tuple[list[int], float]:
    """Return how many layers of each way overlap, and the largest difference of any weight afterwards."""
    divide_world(ParallelConfig(tensor=ranks, sequence=True))
    model = tiny_model(family, num_key_value_heads=4)
    settings = OptimizerConfig(lr=1e-2, eps=1e-4)
    counts, found = [], []
    for overlaps in (True, False):
        parallel = ParallelConfig(tensor=ranks, sequence=True, overlap_exchanges=overlaps)
        trainer = Trainer(model.config, hf_state(model), settings, dtype=torch.float32, parallel=parallel)
        counts.append(sum(type(m) in OVERLAPPED.values() and "layers" in n for n, m in named(trainer)))
        for step in range(STEPS):
            trainer.train_step(pack(random_samples([5, 17, 9, 20], seed=step), 40), TIS, policy_version=3)
        found.append(trainer.export())
    beside, apart = found
    return counts, max((float((beside[name] - apart[name]).abs().max()) for name in apart), default=0.0)


def named(trainer: Trainer) -> list[tuple[str, torch.nn.Module]]:
    return [pair for chunk in trainer.chunks for pair in chunk.named_modules()]


@pytest.mark.parametrize(("ranks", "family"), CASES)
def test_weights_are_those_of_exchanges_apart_from_products(worlds, ranks, family):
    answers = worlds.run(ranks, trained, ranks, family)
    assert [counts for counts, _ in answers] == [[PRODUCTS[family], 0]] * ranks
    assert max(difference for _, difference in answers) < 2e-6
