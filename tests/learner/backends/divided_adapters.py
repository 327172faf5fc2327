"""Adapters that are trained alone and by several ranks."""

from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist

from learner.backends.contract.backend import Exported, ExportedPiece
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.lora import LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import pack
from learner.distributed.process_group import gathered
from tests.learner.division import divide_world
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1, eps=1e-4)
BACKENDS = {"megatron": Trainer, "fsdp": FsdpTrainer}


def trainer_of(
    backend: str, lora: LoraConfig, parallel: ParallelConfig = UNDIVIDED, *,
    dtype: torch.dtype = torch.float32, **model: object,
):  # fmt: skip
    built = tiny_model(**{"tied": True, **model})
    torch.manual_seed(7)  # of the adapters
    settings = {"lora": lora, "parallel": parallel, "dtype": dtype}
    return BACKENDS[backend](built.config, hf_state(built), OPTIMIZER, **settings)


def step(trainer, number: int) -> tuple[float, float]:
    ranks = trainer.data_parallel_group
    samples = random_samples(LENGTHS, seed=number)[ranks.rank() :: ranks.size()]
    result = trainer.train_step(pack(samples, 56), TIS, policy_version=3)
    return result.loss, result.grad_norm


def arrays(tensors) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().clone().numpy() for name, tensor in tensors}


def trained(backend: str, lora: LoraConfig, parallel: ParallelConfig = UNDIVIDED, **model: object):
    """Return losses and norms of three steps, the adapters, the weights that they make, and log-probs."""
    trainer = trainer_of(backend, lora, parallel, **model)
    steps = [step(trainer, number) for number in range(3)]
    weights = arrays(trainer.export().items())  # waits for parameters that are still being gathered
    adapters = arrays(trainer.adapters.streamed())
    for publish, wanted in {"adapter": adapters, "merged": weights}.items():
        published = published_as(publish, trainer)
        assert published.keys() == wanted.keys()
        assert all((published[name] == each).all() for name, each in wanted.items())
    return steps, adapters, weights


def published_as(publish: str, trainer) -> dict[str, np.ndarray]:
    """Return on the first rank what is published, adapters alone or with the weights."""
    adapters = trainer._adapters if isinstance(trainer, FsdpTrainer) else trainer.lora
    adapters.config = adapters.config.model_copy(update={"publish": publish})
    exported = trainer.exported()
    return arrays(exported.here.items()) | arrays(exported.rest()) | put_together(exported)


def put_together(exported: Exported) -> dict[str, np.ndarray]:
    """Return on the first rank what the ranks have in pieces."""
    found = {name: np.full(shape, np.nan, np.float32) for name, shape in exported.shapes.items()}
    for pieces in gathered([(*pieces_of(piece),) for piece in exported.pieces or ()]):
        for rows, names, tensors, starts, step in pieces:
            for row, number, start in zip(rows, tensors, starts, strict=True):
                found[names[number]].reshape(-1)[start : start + len(row) * step : step] = row
    return found if exported.pieces is not None and dist.get_rank() == 0 else {}


def pieces_of(piece: ExportedPiece) -> tuple[object, ...]:
    rows, numbers, starts = (each.cpu().numpy() for each in (piece.rows, piece.tensors, piece.starts))
    if piece.made is not None:  # some rows at a time, in the end as many as are left
        some = (slice(first, first + 5) for first in range(0, len(rows), 5))
        rows = torch.cat([piece.made(place) for place in some]).cpu().numpy()
    return rows.copy(), tuple(piece.names), numbers, starts, piece.step


@cache
def trained_alone(backend: str, lora: LoraConfig, **model: object):
    """Return what `trained` does on one rank, to all layouts that are compared with it."""
    return trained(backend, lora, **model)


def divided(layout: dict[str, object], lora: LoraConfig, model: dict[str, object]):
    """Train on this rank of a world that is divided so."""
    parallel = ParallelConfig.model_validate(layout)
    divide_world(parallel)
    return trained("megatron", lora, parallel, **model)


def assert_same(ours, theirs):
    for found, expected in zip(ours[0], theirs[0], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    for found, expected in zip(ours[1:], theirs[1:], strict=True):
        assert found.keys() == expected.keys()
        assert max(np.abs(found[name] - each).max() for name, each in expected.items()) < 1e-5
