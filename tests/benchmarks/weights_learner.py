"""A learner to measure publications with: it trains on random tokens, and its weights go to the host."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from benchmarks.learner_workloads import Workload, qwen3
from benchmarks.random_models import shape
from learner.algorithms.losses.objective import Objective
from learner.backends.megatron.trainer import Trainer
from learner.config.learner import LearnerConfig
from learner.config.loss import ReinforceLoss
from learner.data.packing import pack
from learner.distributed.process_group import device
from learner.publication.announcement import AdapterBase
from learner.publication.host_copy import Copied, HostCopy, copy_weights

T = TypeVar("T")
SEQUENCE = 2048
"""Tokens of each sequence, at most."""


def medium() -> Workload:
    """Large enough that a copy of it leaves the caches, few enough tokens for a laptop."""
    model = qwen3(768, 2304, 8, 12, 6, 64, 8192)
    model.architectures = ["Qwen3ForCausalLM"]  # by which SGLang tells what to serve
    return Workload(model, torch.bfloat16, 64, 64, 1, rounds=0)


def named(model: str, tokens: int) -> Workload:
    """Return a model of `SHAPES`, trained on so many tokens a step. Raises `ConfigError` for an unknown
    name."""
    return Workload(shape(model), torch.bfloat16, min(SEQUENCE, tokens), tokens, 1, rounds=0)


class Learning:
    """A learner's step, and its weights on their way to the host; all torch work is on one thread."""

    def __init__(self, workload: Workload, config: LearnerConfig, thread: ThreadPoolExecutor) -> None:
        torch.manual_seed(0)
        with device():  # in float32: a run's weights lie between those that bfloat16 has
            model = Qwen3ForCausalLM(workload.model).float()
        state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        del model
        self._trainer = Trainer(
            workload.model, state, config.optimizer, dtype=workload.dtype, parallel=config.parallel,
            lora=config.lora,
        )  # fmt: skip
        self._samples, self._micro_batch = workload.samples(), workload.micro_batch
        self._seed = np.random.default_rng(1)
        self._host, self._thread = HostCopy(torch.bfloat16), thread
        self._bare: list[Tensor] = []

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, done in the thread where torch works."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def step(self) -> None:
        """Train on tokens that have not been seen, as a run does."""
        vocabulary = self._trainer.hf_config.vocab_size
        fresh = [
            replace(s, token_ids=self._seed.integers(0, vocabulary, len(s.token_ids)).astype(np.int32))
            for s in self._samples
        ]
        batches = pack(fresh, self._micro_batch)
        self._trainer.train_step(batches, Objective(ReinforceLoss()), policy_version=0)

    async def copy(self) -> Copied:
        """Copy as the learner does before it publishes."""
        return await copy_weights(self._host, self._trainer, self._thread)

    @property
    def adapter_base(self) -> AdapterBase | None:
        """Return what published adapters belong to; None where whole weights are published."""
        return self._host.adapter_base(self._trainer.adapters)

    @property
    def copy_s(self) -> float:
        """Return the seconds of the latest copy."""
        return self._host.seconds

    def bare_copy_s(self) -> float:
        """Return the seconds that as many bytes take from the device to the host when nothing else is
        done."""
        weights = [
            p.detach() for chunk in self._trainer.chunks for p in chunk.parameters() if p.requires_grad
        ]
        if not self._bare:
            self._bare = [torch.zeros(w.shape, dtype=w.dtype, pin_memory=w.is_cuda) for w in weights]
        _wait()
        began = time.perf_counter()
        for buffer, weight in zip(self._bare, weights, strict=True):
            buffer.copy_(weight, non_blocking=True)
        _wait()
        return time.perf_counter() - began


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
