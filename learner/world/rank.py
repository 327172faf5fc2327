"""What every rank of the learner's world does in a step: its own share of the data, its part of the model."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor

from bus.errors import WorldError
from bus.requests import GroupRef
from bus.trajectory import Trajectory
from learner.algorithms.rl_step import train_on
from learner.backends.base import Backend, StepResult
from learner.checkpoint.commit import PendingCheckpoint, start_checkpoint
from learner.config.algorithm import SFTLoss
from learner.config.optimizer import OptimizerConfig
from learner.data.batches import StepBatch
from learner.data.data_parallel import equally_many
from learner.data.demonstrations import Demonstrations
from learner.publication.host_copy import Copied, HostCopy, copy_weights
from learner.scoring.frozen_policies import hold_frozen_policies
from learner.settings import LearnerSettings
from learner.world.commands import Begin, Fetch, Train, WarmUp
from storage.client.reader import ReplayReader

T = TypeVar("T")
Groups = list[list[Trajectory]]


class Rank:
    """This process's part. All ranks call the same methods in the same order; most are collective.

    Torch works on `thread` alone, which keeps the bus responsive: a CUDA device is chosen for each thread.
    """

    def __init__(
        self, backend: Backend, settings: LearnerSettings, *,
        reader: ReplayReader, demonstrations: Demonstrations | None, thread: Executor,
    ) -> None:  # fmt: skip
        self.hf_config = backend.hf_config
        self._data_parallel = backend.data_parallel_group
        self.share, self.shares = self._data_parallel.rank(), self._data_parallel.size()
        self._backend = backend
        self._settings = settings
        self._reader = reader
        self._demonstrations = demonstrations
        self._thread = thread
        self._host = HostCopy(getattr(torch, settings.learner.publish_dtype))
        self._saving: PendingCheckpoint | None = None
        self._fetching: dict[int, tuple[tuple[GroupRef, ...], asyncio.Task[Groups]]] = {}
        """By step: which groups, and their trajectories."""

    def fetch(self, command: Fetch) -> None:
        """Begin to fetch this rank's groups."""
        refs = command.shares[self.share]
        task = asyncio.create_task(self._reader.fetch(refs), name=f"fetch batch {command.step}")
        self._fetching[command.step] = refs, task

    async def fetched(self, step: int) -> None:
        """Return when this rank's groups of `step` are here; raises what fetching raised."""
        _, task = self._fetching[step]
        await asyncio.shield(task)

    def forget(self) -> None:
        """Fetch no more."""
        for _, task in self._fetching.values():
            task.cancel()
        self._fetching.clear()

    async def train(self, command: Train) -> tuple[StepBatch, StepResult]:
        """One optimizer step on what was fetched for it; the counts are those of all ranks."""
        refs, task = self._fetching[command.step]
        groups = await task
        del self._fetching[command.step]
        weights = [ref.weight for ref in refs]
        return await self.in_thread(lambda: self._train(groups, weights, command))

    async def warm_up(self, command: WarmUp) -> StepResult:
        """One optimizer step on demonstrations."""
        return await self.in_thread(lambda: self._warm_up(command.step))

    async def begin(self, command: Begin) -> None:
        """Give torch the stage's threads, and the model a fresh optimizer if it is to have one."""
        stage = self._settings.warmup if command.stage == "warmup" else self._settings.learner
        await self.in_thread(lambda: torch.set_num_threads(stage.threads))
        if command.fresh_optimizer:
            await self.in_thread(lambda: self._begin_afresh(command, stage.optimizer))

    async def export(self) -> dict[str, Tensor]:
        """The weights by Hugging Face name."""
        return await self.in_thread(self._backend.export)

    async def copy_weights(self) -> Copied:
        """The weights on their way to the host; rank 0 alone calls this, for `export`."""
        return await translated(copy_weights(self._host, self._backend, self._thread))

    async def make_room(self) -> None:
        """Leave to others what the next step does not need of the device; the step takes it again."""
        await self.in_thread(self._backend.release_memory)

    @property
    def copy_s(self) -> float:
        """Seconds of the latest `copy_weights` that torch's work took."""
        return self._host.seconds

    async def save(self, step: int, extra: Mapping[str, JsonValue]) -> None:
        """Begin to write a checkpoint, while training goes on; `extra` counts at rank 0."""
        root, keep, before = self._settings.checkpoints, self._settings.learner.checkpoint.keep, self._saving
        backend = self._backend
        self._saving = await self.in_thread(
            lambda: start_checkpoint(backend, root, step, extra, keep=keep, after=before)
        )

    @property
    def written(self) -> bool:
        """Whether this rank has written its part of the checkpoint begun last."""
        return self._saving is None or self._saving.written

    async def saved(self) -> None:
        """Return when the checkpoint begun last survives a power cut."""
        if self._saving is not None:
            await self.in_thread(self._saving.finish)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run torch work where all of it runs. Raises `WorldError` when another rank was lost meanwhile."""
        return await in_thread(self._thread, work)

    def _begin_afresh(self, command: Begin, optimizer: OptimizerConfig) -> None:
        self._backend.set_optimizer(optimizer)
        learner = self._settings.learner
        hold_frozen_policies(self._backend, self._settings, learner, stage=command.stage, step=0)

    def _train(self, groups: Groups, weights: list[float], command: Train) -> tuple[StepBatch, StepResult]:
        return train_on(
            self._backend,
            groups,
            weights,
            self._settings.learner,
            step=command.step,
            policy_version=command.policy_version,
            temperature=self._settings.temperature,
        )

    def _warm_up(self, step: int) -> StepResult:
        if self._demonstrations is None:
            raise RuntimeError("no demonstrations to warm up on")
        batches = self._demonstrations.step(
            step, self._settings.warmup, self._settings.learner.batch, share=self.share, shares=self.shares
        )
        return self._backend.train_step(
            equally_many(batches, self._data_parallel), SFTLoss(), temperature=1.0, policy_version=0
        )


async def in_thread(thread: Executor, work: Callable[[], T]) -> T:
    """Run `work` on `thread`. Raises `WorldError` when a collective in it lost another rank."""
    return await translated(asyncio.get_running_loop().run_in_executor(thread, work))


async def translated(work: Awaitable[T]) -> T:
    """What `work` returns. Raises `WorldError` when a collective in it lost another rank."""
    try:
        return await work
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise WorldError(f"rank {dist.get_rank()} of the learner lost another: {error}") from error
        raise
