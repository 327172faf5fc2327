"""A run in one process: real bus, storage, learner and shadow; rollouts are drawn, nobody generates them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from bus.config import BusConfig
from bus.connection import Bus
from bus.messages import Lease
from bus.server.nats_server import NatsServer
from bus.streams import consume
from bus.topology import ensure
from bus.trajectory import Trajectory
from learner.config.batch import BatchConfig
from learner.config.learner import CheckpointConfig, LearnerConfig
from learner.config.model import ModelConfig, ScratchModel
from learner.config.optimizer import OptimizerConfig
from learner.config.process_settings import LearnerSettings
from learner.config.warmup import WarmupConfig
from learner.history import shadow
from learner.history.shadow import ShadowProgress, ShadowSettings, run_shadow
from learner.initial.scratch_model import character_tokenizer
from learner.progress import lineage
from learner.progress.progress import Progress
from learner.run import service
from learner.run.train import Learner
from storage.client import reader
from storage.dispatch import dispatcher
from storage.settings.admission import AdmissionConfig
from storage.settings.evaluation import EvaluationConfig
from tests.factories import make_trajectory
from tests.storage.serving import SHARDS, Storage, send, serving, until

LIMIT_S = 120
"""A learner or shadow of a few steps that takes longer, whatever else the machine does, stands still."""
ADMISSION = AdmissionConfig(groups_per_step=2, samples_per_prompt=3, max_staleness=0)
SCRATCH = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, context=64)
TRAINS_FROM = 1
"""The version that the warm-up makes."""
LEARNER = LearnerConfig(
    steps=4,
    optimizer=OptimizerConfig(lr=1e-3),
    batch=BatchConfig(tokens_per_micro_batch=32),
    checkpoint=CheckpointConfig(save_every=2, keep=2),
)


def in_one_process(patch: pytest.MonkeyPatch) -> None:
    """The world of processes is the test's own, and waits are cut short.

    Files of a checkpoint are written before the next step, which then commits it: it is certain where a
    learner resumes. A learner and its shadow compute on one thread, one after the other: two threads that
    gather gradients over the one process group of this process would disturb each other.
    """
    thread = _TrainThread()
    for module in (service, shadow):
        patch.setattr(module, "ThreadPoolExecutor", lambda *_, **__: thread)
        patch.setattr(module, "init_world", lambda *_, **__: None)
        patch.setattr(module, "close_world", lambda: None)
    patch.setattr(Learner, "_step", _step_once_written(Learner._step))
    patch.setattr(shadow, "POLL_S", 0.02)
    patch.setattr(consume, "POLL_S", 0.1)
    patch.setattr(dispatcher, "POLL_S", 0.05)
    patch.setattr(dispatcher, "LONG_POLL_S", 0.3)
    patch.setattr(reader, "RETRY_S", 0.02)


class _TrainThread(ThreadPoolExecutor):
    """One thread for all learners and shadows of this process, which outlives each of them."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="train")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the work given so far; the thread stays for the others, and ends with this object."""
        self.submit(int).result(LIMIT_S)


def _step_once_written(step: Callable[[Learner], Awaitable[bool]]) -> Callable[[Learner], Awaitable[bool]]:
    async def step_once_written(learner: Learner) -> bool:
        rank = learner._world.rank
        await until(lambda: rank._saving is None or rank._saving.written, seconds=LIMIT_S)
        return await step(learner)

    return step_once_written


def rollout(lease: Lease, sample: int) -> Trajectory:
    """The same for the same lease, of several lengths and rewards."""
    draw = np.random.default_rng([7, lease.lease_id, sample])
    made = make_trajectory(
        lease.lease_id,
        sample,
        group_size=lease.samples,
        tokens=int(draw.integers(6, 20)),
        policy_version=lease.policy_version,
        reward=float(draw.random()),
    )
    return replace(made, token_ids=made.token_ids % np.int32(len(character_tokenizer())))


@dataclass
class MiniRun:
    """The learner's side of it."""

    bus: Bus
    directory: Path
    storage: Storage
    demonstrations: Path
    held_after: float = inf
    """Leases of later policy versions are rolled out once `released` is set: until then no learner trains
    a later step, for with no staleness a step's groups are of the version that the step before it made."""
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def settings(self, **changes: object) -> LearnerSettings:
        """Return the learner's settings; `changes` are those of the section `learner`."""
        return LearnerSettings(
            model=ModelConfig(scratch=SCRATCH, dtype="float32"),
            warmup=WarmupConfig(steps=2, batch_size=4),
            learner=LEARNER.model_copy(update=changes),
            evaluation=EvaluationConfig(every_versions=0),
            samples_per_prompt=ADMISSION.samples_per_prompt,
            seed=3,
            model_directory=self.directory / "model",
            checkpoints=self.directory / "checkpoints",
            progress=self.directory / "progress.json",
            lineage=self.directory / "lineage.jsonl",
            export=self.directory / "export",
        )

    async def train(self, **changes: object) -> Progress:
        """A learner until its end."""
        async with asyncio.timeout(LIMIT_S):
            return await service.run(self.bus, self.settings(**changes), self.demonstrations, asyncio.Event())

    async def train_and_die(self, after_step: int, **changes: object) -> None:
        """A learner that is gone at once when it has trained that step, and that comes no further.

        A checkpoint that was begun before that step is durable.
        """
        save_every = self.settings(**changes).learner.checkpoint.save_every
        durable = (after_step - 1) // save_every * save_every
        self.hold(after_step)
        async with asyncio.TaskGroup() as tasks:
            learner = tasks.create_task(self.train(**changes))
            await until(
                lambda: after_step in self.steps() and self._durable_step() >= durable, seconds=LIMIT_S
            )
            learner.cancel()
        assert learner.cancelled()
        self.release()

    def _durable_step(self) -> int:
        """The step of the latest checkpoint that the learner committed; -1 before there is one."""
        path = self.directory / "progress.json"
        return json.loads(path.read_text())["step"] if path.exists() else -1

    def hold(self, after_step: int) -> None:
        """Let no learner train a later step until `release`."""
        self.held_after, self.released = TRAINS_FROM + after_step - 1, asyncio.Event()

    def release(self) -> None:
        """Roll out everything again, also what was held."""
        self.held_after = inf
        self.released.set()

    async def follow(
        self, stop: asyncio.Event, *, from_checkpoint: Path | None = None, **changes: object
    ) -> ShadowProgress:
        """A shadow until the learner's end or `stop`."""
        kept = self.directory / "shadow"
        kept.mkdir(exist_ok=True)
        files = {name: kept / name for name in ("checkpoints", "progress", "lineage", "export")}
        own = replace(self.settings(**changes), **files)
        settings = ShadowSettings("other", own, kept / "metrics.jsonl", from_checkpoint)
        async with asyncio.timeout(LIMIT_S):
            return await run_shadow(self.bus, settings, self.demonstrations, stop)

    def steps(self) -> dict[int, lineage.TrainedStep]:
        """Return what the learner trained so far."""
        return lineage.steps(self.directory / "lineage.jsonl")

    def shadow_steps(self) -> dict[int, lineage.TrainedStep]:
        """Return what the shadow trained so far."""
        return lineage.steps(self.directory / "shadow" / "lineage")


async def _roll_out(run: MiniRun, leases: asyncio.Queue[Lease]) -> None:
    """Answer every lease that appears on the bus."""
    while True:
        lease = await leases.get()
        if lease.policy_version > run.held_after:
            await run.released.wait()
        await send(run.bus, *(rollout(lease, sample) for sample in range(lease.samples)))


@asynccontextmanager
async def mini_run(bus: Bus, directory: Path) -> AsyncIterator[MiniRun]:
    """Storage and rollouts of a run in `directory`, which is there, ready for its learner."""
    demonstrations = directory / "demonstrations.jsonl"
    rows = [{"prompt": f"sort {n}", "response": str(n)} for n in range(7)]
    demonstrations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    leases: asyncio.Queue[Lease] = asyncio.Queue()
    await bus.listen(bus.subject("tasks", "rollout", "*"), Lease, leases.put_nowait)
    async with serving(bus, directory, ADMISSION) as storage, asyncio.TaskGroup() as tasks:
        run = MiniRun(bus, directory, storage, demonstrations)
        rolling_out = tasks.create_task(_roll_out(run, leases))
        yield run
        rolling_out.cancel()


async def past_run(directory: Path, *, steps: int, killed_after: int, **changes: object) -> MiniRun:
    """A run that has ended, whose learner was killed once: only its directory is left.

    `changes` are those of the section `learner`."""
    async with (
        NatsServer(directory / "nats") as server,
        Bus.connect(BusConfig(url=server.url), "past", name="past") as bus,
    ):
        await ensure(bus.js, bus.topology, SHARDS)
        await bus.create_keys()
        async with mini_run(bus, directory) as run:
            await run.train_and_die(killed_after, **changes)
            await run.train(steps=steps, **changes)
            return run
