"""`launch learner --shadow`: trains on the learner's steps with an objective of its own, and disturbs nobody.

A shadow asks which groups each step was given and reads them; it leases, commits, publishes and resumes
nothing. It takes a step once the learner has published the version that the step made. Its history is the
learner's: when a learner resumes from a checkpoint, and the steps after it get other groups, the shadow goes
back as well."""

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TypeVar

import structlog

from bus.codec import Json
from bus.connection import Bus
from bus.connection.roles import guarded, hold_role
from bus.connection.status import Activity, report_status
from bus.errors import UnreadableGroupsError
from bus.messages import Metrics
from bus.requests import StepGroups
from bus.trajectory import Trajectory
from bus.waiting import ended_before, set_within
from learner.backends.contract.backend import Backend
from learner.backends.factory import close_world, init_world
from learner.checkpoint.commit import read_extra, save_checkpoint
from learner.checkpoint.newest_checkpoint import newest_whole
from learner.config.process_settings import LearnerSettings
from learner.initial.initial import Initial, prepare
from learner.logprobs.served_teachers import ask_teachers, refuse_other_teachers
from learner.metrics.step_metrics import batch_values, step_values
from learner.progress import lineage
from learner.progress.progress import Progress, values_to_save
from learner.run.restore import restore_alone
from learner.step.rl_step import lineage_line, train_on
from storage.client.reader import ReplayReader
from storage.disk import checkpoints
from storage.disk.atomic_files import append_lines, remove, write_json

log = structlog.get_logger()
T = TypeVar("T")
POLL_S = 0.5


@dataclass(frozen=True)
class ShadowSettings:
    """Says what a shadow needs to know."""

    name: str
    learner: LearnerSettings
    """The shadow's own objective and its own files."""
    metrics: Path
    """Says where the shadow's numbers are written as JSON lines."""
    from_checkpoint: Path | None = None
    """A learner's checkpoint to begin from, instead of the initial model."""


@dataclass
class ShadowProgress(Progress):
    """Says how far a shadow has come, in the learner's steps and versions."""

    steps_retired: int = 0
    """Steps passed over because their groups had been retired."""
    rollbacks: int = 0
    """Says how often a learner's resume took back steps that this one had trained on."""


async def run_shadow(
    bus: Bus, settings: ShadowSettings, demonstrations: Path | None, stop: asyncio.Event
) -> ShadowProgress:
    """Follow the run's learner to its end or until `stop`; returns how far it came.

    Holds a role of its own meanwhile, and raises `FencedError` if another shadow of that name takes it over.
    """
    incarnation = secrets.token_hex(4)
    async with hold_role(bus, f"learner-shadow-{settings.name}", incarnation) as renewing:
        init_world()
        shadow = Shadow(bus, settings, demonstrations, incarnation, stop)
        await guarded(shadow.run(), renewing)
        close_world()
        return shadow.progress


class Shadow:
    """One process of a shadow learner."""

    def __init__(
        self, bus: Bus, settings: ShadowSettings, demonstrations: Path | None, incarnation: str,
        stop: asyncio.Event,
    ) -> None:  # fmt: skip
        self.progress = ShadowProgress()
        self._bus = bus
        self._settings = settings
        self._demonstrations = demonstrations
        self._incarnation = incarnation
        self._stop = stop
        self._source = f"learner-shadow-{settings.name}"
        self._reader = ReplayReader(bus, incarnation, read=settings.learner.learner.read)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._initial: Initial | None = None
        self._backend: Backend | None = None
        self._followed: str | None = None
        """The learner's incarnation whose steps ours are known to agree with."""
        self._activity = Activity("starting")
        self._lag_steps = 0

    async def run(self) -> None:
        """Train until the learner is done, or until `stop`; either way the state is saved."""
        finished = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                report_status(self._bus, source=self._source, role="shadow", look=self._look, stop=finished)
            )
            try:
                if await self._learner_is_there():
                    self._activity = Activity("preparing the model, and warming it up")
                    await self._in_thread(self._begin)
                    await self._follow()
                    self._activity = Activity("saving a checkpoint")
                    await self._in_thread(self._save)
            finally:
                finished.set()
                self._reader.close()
        self._thread.shutdown()

    async def _follow(self) -> None:
        learner = self._settings.learner.learner
        while self.progress.stage == "rl" and self.progress.step < learner.steps:
            given = await self._next_step()
            if given is None:
                return
            groups = await self._fetch(given)
            if groups is not None:
                await self._train_on(given, groups)
                if self.progress.step % learner.checkpoint.save_every == 0:
                    self._activity = Activity("saving a checkpoint")
                    await self._in_thread(self._save)

    # --- what the learner does ---

    async def _learner_is_there(self) -> bool:
        """Wait for the learner's first version: then the model's files are whole, should they be the same."""
        while (given := await self._asked(1)) is not None:
            if given.stage:
                return True
            await self._pause(Activity("waiting for the learner's first policy version", wait="policy"))
        return False

    async def _next_step(self) -> StepGroups | None:
        """Return the step after ours once the learner has trained it; None when it trains no more, or on
        `stop`."""
        while (given := await self._asked(self.progress.step + 1)) is not None:
            step, over = self.progress.step, given.stage == "done"
            if given.incarnation != self._followed and (over or given.trained_through >= step):
                other = await self._first_other_step(given.trained_through)
                if other is not None:
                    await self._in_thread(partial(self._roll_back, other))
                    continue
                self._followed = given.incarnation
            self._lag_steps = max(0, given.trained_through - step)
            if given.groups and given.trained_through > step:
                return given
            if over:
                return None
            await self._pause(Activity(f"waiting for the learner to train step {step + 1}", wait="batch"))
        return None

    async def _first_other_step(self, trained_through: int) -> int | None:
        """Return the first of our steps that the learner now has otherwise, or no longer; None when all
        agree."""
        ours = await asyncio.to_thread(lineage.steps, self._settings.learner.lineage)
        for step, line in ours.items():
            if step <= self.progress.step:
                now = await self._asked(step)
                if now is None:
                    return None
                if step > trained_through or tuple(group.lease_id for group in now.groups) != line.leases:
                    return step
        return None

    async def _asked(self, step: int) -> StepGroups | None:
        """Return what storage says of a step; None if `stop` came first."""
        asking = asyncio.create_task(self._reader.given(step))
        if self._stop.is_set() or not await ended_before(self._stop, asking):
            asking.cancel()
            return None
        return asking.result()

    async def _fetch(self, given: StepGroups) -> list[list[Trajectory]] | None:
        """Return the groups of a step; None when they were retired, which is counted, or on `stop`."""
        self._activity = Activity(f"reading step {given.step}")
        fetching = asyncio.create_task(self._reader.fetch(given.groups, on_wait=self._on_wait))
        try:
            if await ended_before(self._stop, fetching):
                return fetching.result()
            fetching.cancel()
        except UnreadableGroupsError as error:
            self._pass_over(given, str(error))
        return None

    def _pass_over(self, given: StepGroups, reason: str) -> None:
        self.progress.step = given.step
        self.progress.steps_retired += 1
        log.warning("step_passed_over", step=given.step, so_far=self.progress.steps_retired, reason=reason)

    # --- training ---

    async def _train_on(self, given: StepGroups, groups: list[list[Trajectory]]) -> None:
        started = time.monotonic()
        progress, settings, backend = self.progress, self._settings.learner, self._backend
        if backend is None:
            raise RuntimeError("nothing to train")
        self._activity = Activity(f"asking teachers about step {given.step}")
        asking = asyncio.create_task(
            ask_teachers(groups, settings.learner, vocab_size=backend.hf_config.get_text_config().vocab_size)
        )
        if not await ended_before(self._stop, asking):
            asking.cancel()
            return
        self._activity = Activity(f"training step {given.step}")
        version, weights = given.trains_from + given.step - 1, [group.weight for group in given.groups]
        batch, result = await self._in_thread(
            lambda: train_on(
                backend,
                groups,
                weights,
                settings.learner,
                step=given.step,
                policy_version=version,
                baselines=progress.baselines,
                answers=asking.result(),
            )
        )
        line = lineage_line(given.step, version + 1, self._incarnation, given.groups, batch, result)
        lineage.record(settings.lineage, line)
        progress.step = given.step
        progress.policy_version, progress.trains_from = version + 1, given.trains_from
        progress.groups[str(given.step)] = list(line.leases)
        progress.baselines = dict(batch.baselines)
        progress.trajectories_trained += batch.trajectories
        progress.tokens_trained += batch.tokens
        progress.steps_skipped += result.skipped
        progress.rl_s += time.monotonic() - started
        await self._report(
            {**batch_values(batch), **step_values(result), "time/step_s": time.monotonic() - started}
        )

    def _begin(self) -> None:
        """Load the newest state of our own, else that of `from_checkpoint`, else the initial model."""
        settings = self._settings.learner
        self._initial = self._initial or prepare(settings, self._demonstrations)
        refuse_other_teachers(
            settings.learner, settings.model_directory, self._stop.is_set,
            engine_context=settings.engine_context,
        )  # fmt: skip
        own = newest_whole(settings.checkpoints)
        start = own or self._settings.from_checkpoint
        if own is not None:
            self.progress = ShadowProgress.from_json(read_extra(own))
        else:
            self.progress = _progress_at(start)
        self._backend = None  # a backend from before goes first
        self._backend = restore_alone(
            settings, self._initial, start, self.progress, stopped=self._stop.is_set
        )
        log.info("shadow_begins", checkpoint=str(start), step=self.progress.step)

    def _roll_back(self, step: int) -> None:
        log.warning("shadow_rolls_back", before_step=step, was_at=self.progress.step)
        rollbacks, root = self.progress.rollbacks + 1, self._settings.learner.checkpoints
        for saved in checkpoints.steps(root):
            if saved >= step:
                remove(checkpoints.directory(root, saved))
        self._begin()
        self.progress.rollbacks = rollbacks

    def _save(self) -> None:
        if self._backend is not None:
            settings, step = self._settings.learner, self.progress.step
            values, keep = values_to_save(settings, self.progress), settings.learner.checkpoint.keep
            save_checkpoint(self._backend, settings.checkpoints, step, values, keep=keep)
            write_json(settings.progress, values)

    # --- what others see ---

    async def _report(self, values: dict[str, Json]) -> None:
        progress = self.progress
        values = {
            "train/stage": "shadow",
            "train/policy_version": progress.policy_version,
            **{k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()},
            "shadow/lag_steps": self._lag_steps,
            "shadow/steps_retired": progress.steps_retired,
            "shadow/rollbacks": progress.rollbacks,
        }
        metrics = Metrics(source=self._source, step=progress.step, time_s=time.time(), values=values)
        head = {"time_s": metrics.time_s, "source": self._source, "step": metrics.step, "kind": "metrics"}
        append_lines(self._settings.metrics, [head | values])
        await self._bus.notify(self._bus.subject("events", "metrics"), metrics)

    def _on_wait(self, reason: str) -> None:
        self._activity = Activity(reason, wait="groups")

    def _look(self) -> Activity:
        progress = self.progress
        values: dict[str, Json] = {
            "stage": progress.stage,
            "step": progress.step,
            "policy_version": progress.policy_version,
            "trajectories_trained": progress.trajectories_trained,
            "lag_steps": self._lag_steps,
            "steps_retired": progress.steps_retired,
            "rollbacks": progress.rollbacks,
        }
        return replace(self._activity, values=values)

    async def _pause(self, activity: Activity) -> None:
        self._activity = activity
        await set_within(self._stop, POLL_S)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Torch work runs on one thread of its own, so that the bus stays responsive."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _progress_at(checkpoint: Path | None) -> ShadowProgress:
    if checkpoint is None:
        return ShadowProgress()
    found = Progress.from_json(read_extra(checkpoint))
    return ShadowProgress(
        stage="warmup" if found.stage == "warmup" else "rl",
        warmup_step=found.warmup_step,
        step=found.step,
        policy_version=found.policy_version,
        trains_from=found.trains_from,
        baselines=found.baselines,
    )
