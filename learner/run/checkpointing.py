"""Saves where a learner stands while it trains on, one checkpoint at a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from bus.errors import FencedError, SluiceError, WorldError, leaves
from bus.evaluation_messages import EvaluationResult
from learner.checkpoint.commit import WRITING_TIMEOUT_S
from learner.config.process_settings import LearnerSettings
from learner.progress.progress import Best, Progress, values_to_save
from learner.world.rank import Rank
from learner.world.world import World
from storage.disk.atomic_files import write_json
from storage.settings.evaluation import ALWAYS, HELD_OUT

log = structlog.get_logger()
WRITTEN_POLL_S = 0.05
LOST_REMEDY = (
    "mend what `reason` says; the steps since the checkpoint before are trained again, and fewer with a "
    "smaller learner.checkpoint.save_every"
)


class Checkpointing:
    """Begins checkpoints of a learner's world, and sees each through before the next."""

    def __init__(
        self, settings: LearnerSettings, world: World, progress: Progress, *,
        prepared: Callable[[], Awaitable[None]], committed: Callable[[int], Awaitable[None]],
        on_doing: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`prepared` returns when what precedes a checkpoint is durable, and `committed` tells storage of the
        step of one that is; `on_doing` hears what goes on."""
        self.saved_step = progress.step
        """Step of the checkpoint begun last."""
        self._saved_warmup_step = progress.warmup_step
        self._settings = settings
        self._world = world
        self._progress = progress
        self._prepared = prepared
        self._committed = committed
        self._on_doing = on_doing
        self._saving: tuple[int, dict[str, Any]] | None = None
        """Step and progress of the checkpoint that is being written."""
        self._saving_since = 0.0
        """Monotonic time at which that checkpoint was begun."""

    async def after_step(self) -> None:
        """Finish the checkpoint under way if its files are written, and begin the next if it is due."""
        if self._saving is not None and (self._is_overdue or await self._world.call(Rank.written)):
            await self.finish()
        if self._saving is None and self._is_due(self._settings.learner.checkpoint.save_every):
            await self.begin()

    async def begin(self) -> None:
        """Begin to save; the files are written while training goes on."""
        await self.finish()
        self._on_doing("waiting for learner.publication.keep_versions to be written")
        await self._prepared()
        self._on_doing("copying the state for a checkpoint")
        values = await asyncio.to_thread(values_to_save, self._settings, self._progress)
        self.saved_step, self._saving_since = self._progress.step, time.monotonic()
        self._saved_warmup_step = self._progress.warmup_step
        await self._world.call(Rank.save, self.saved_step, values)
        self._saving = self.saved_step, values

    async def finish(self) -> None:
        """See the save through; only then may storage forget that these groups could be needed again."""
        if self._saving is None:
            return
        self._on_doing("finishing a checkpoint")
        step, progress = self._saving
        await self._named(progress)
        await self._committed(step)

    async def rescue(self, error: BaseException) -> None:
        """Give the checkpoint under way its name although `error` ends the learner, or log that it is lost.

        What describes the files of all ranks is made by all of them together. So that is possible where they
        still take calls, and where no other learner writes. Storage hears of it from the next learner."""
        if self._saving is None:
            return
        (step, progress), self._saving, errors = self._saving, None, list(leaves(error))
        lost = str(errors[0]) or "another rank failed, or another learner took over"
        alone = any(isinstance(each, WorldError | FencedError | asyncio.CancelledError) for each in errors)
        if self._world.takes_calls and not alone:
            try:
                await self._named(progress)
            except (SluiceError, OSError, RuntimeError) as failure:
                lost = str(failure)
            else:
                log.info("checkpoint_rescued", step=step)
                return
        log.warning("checkpoint_lost", step=step, reason=lost, remedy=LOST_REMEDY)

    async def _named(self, progress: dict[str, Any]) -> None:
        """Wait until every rank has written its files, and give the checkpoint its name."""
        # asked again and again, so that no collective waits for a disk
        while not await self._world.call(Rank.written) and not self._is_overdue:  # noqa: ASYNC110
            await asyncio.sleep(WRITTEN_POLL_S)
        self._saving = None
        await self._world.call(Rank.saved)
        await asyncio.to_thread(write_json, self._settings.progress, progress)

    @property
    def _is_overdue(self) -> bool:
        """Return whether the checkpoint under way takes so long that its disk must be taken to hang."""
        return time.monotonic() > self._saving_since + WRITING_TIMEOUT_S

    def _is_due(self, save_every: int) -> bool:
        """Return whether a stage passed a multiple of `save_every` since the checkpoint begun last. One that
        the disk is still writing then is followed by the next as soon as it is done, and delays no step."""
        now, then = self._progress, (self._saved_warmup_step, self.saved_step)
        stages = zip((now.warmup_step, now.step), then, strict=True)
        return any(step // save_every > saved // save_every for step, saved in stages)


class BestCheckpoint:
    """Follows one score of one data set. What it knows is part of the progress, and so of checkpoints."""

    def __init__(self, metric: str | None, progress: Progress, *, warms_up: bool) -> None:
        """Follow `metric`, written `set/score`, or none. Results that another learner awaited never come."""
        self._metric = metric
        self._progress = progress
        self._warms_up = warms_up
        self.asks_again = metric is not None and progress.step in progress.awaited
        """Whether a result of the version that the learner resumed from was awaited, and is to be asked for
        again."""
        progress.awaited = []
        if metric is None or (progress.best is not None and progress.best.metric != metric):
            progress.best = None  # what was best by another score says nothing of this one

    def asked(self, policy_version: int) -> None:
        """The version is evaluated: its checkpoint stays until the result says whether it is best."""
        step = self._step(policy_version)
        if self._metric is not None and step >= 0:
            self._progress.awaited = sorted({*self._progress.awaited, step})

    def keeps(self, step: int) -> bool:
        """Return whether the checkpoint of a step is kept, and so has to be written."""
        return step in self._progress.kept

    def on_result(self, result: EvaluationResult) -> None:
        """Take note of a result, of whatever data set. Of equal ones the first stays best."""
        name, _, score = (self._metric or "").partition("/")
        step, progress = self._step(result.policy_version), self._progress
        if (result.data_set or HELD_OUT) != name or step not in progress.awaited:
            return
        progress.awaited = [awaited for awaited in progress.awaited if awaited != step]
        found = getattr(result, score) if score in ALWAYS else result.scores.get(score)
        if found is not None and (progress.best is None or found > progress.best.value):
            progress.best = Best(str(self._metric), found, result.policy_version, step)

    def _step(self, policy_version: int) -> int:
        """Return the step that made a version; it is negative before reinforcement learning."""
        progress = self._progress
        begins = int(self._warms_up) if progress.stage == "warmup" else progress.trains_from
        return policy_version - begins
