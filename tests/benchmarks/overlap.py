"""Tells what asynchrony is worth: one real run, in turns as configured and held synchronous, and who waits in
each.

Bus, storage, learner and actors are the processes of `launch local`. Only storage is started again, with
another bound on staleness, when the mode changes; so engine and learner stay warm, and both modes have the
same weights, lengths and machine. The steps after a change do not count. Whatever ends the bench early, what
was measured by then is reported.

The figures of docs/performance.md on two H200s, one for the learner and one for SGLang:

    launch bench overlap --model qwen3-0.6b --limit-s 450 --learner-device 0 --engine-device 1 --steps 10 \\
        --rounds 1 --prompt-tokens 768 --admission.groups-per-step 32 --admission.samples-per-prompt 8 \\
        --admission.max-staleness 4 --actors.environment.lengths.median 80 \\
        --actors.environment.lengths.longest 1024 --actors.engine.type sglang \\
        --actors.fleet.requests-per-engine 256 --actors.engine.server.max-running-requests 256 \\
        --actors.engine.server.mem-fraction-static 0.8 --learner.reference.kl-coef 0.001 \\
        --learner.batch.tokens-per-micro-batch 32768 --learner.publication.transport.type files \\
        --learner.publication.transport.directory /dev/shm/w --json
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

import structlog

from benchmarks.overlap_record import Heard, Turn
from benchmarks.overlap_report import MODES, account_of, figures, staleness, trained
from bus.codec import Json
from bus.errors import SluiceError
from bus.waiting import cancelled, ended_before, set_within
from launch.settings.run_config import RunConfig
from soak.local_run import END_TIMEOUT_S, LocalRun
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory

log = structlog.get_logger()
WELL = "well"
START_TIMEOUT_S = 1500.0
"""Time limit for the first step: the first start of a server on a GPU compiles kernels."""
STEP_TIMEOUT_S = 600.0
POLL_S = 0.5
MEASURING_SHARE, ENDING_SHARE = 0.88, 0.95
"""Shares of the limit after which measuring ends and the run is killed; the rest is for the account."""
KINDLY_S = 45.0
"""Time for the run's end, which writes a checkpoint; it is less where measuring would get less than half."""
ACCOUNT_S = 5.0
"""No account is begun when fewer seconds of the limit are left."""


class LimitError(SluiceError):
    """Raised when the time limit has passed."""


@dataclass(frozen=True)
class Plan:
    """Says how long is measured."""

    steps: int
    """Measured in each turn, after those in which the mode settles."""
    rounds: int
    """Each is a turn of one mode, then one of the other; every other round begins with the other."""
    limit_s: float = inf
    """Time limit for the run's start, for measuring and for the run's end, counted from `began`."""
    began: float = field(default_factory=time.monotonic)
    """Says when the bench began, on the monotonic clock."""

    @property
    def modes(self) -> list[str]:
        """Mode of each turn, in order."""
        return [mode for n in range(self.rounds) for mode in (MODES if n % 2 == 0 else reversed(MODES))]

    @property
    def measuring_s(self) -> float:
        """Return the time at which measuring ends and the run's end begins."""
        return min(MEASURING_SHARE * self.limit_s, max(self.limit_s / 2, self.ending_s - KINDLY_S))

    @property
    def ending_s(self) -> float:
        """Return the time at which the run is killed."""
        return ENDING_SHARE * self.limit_s

    def elapsed_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began


async def bench_overlap(config: RunConfig, plan: Plan, stop: asyncio.Event) -> dict[str, Json]:
    """Measure; raises `SluiceError` when it ends before a turn has the steps that count.

    The report's "cut" says what ended it before the plan was done: the limit, `stop`, or a run that does not
    train. Its "ended" is "well", or what was wrong with the run's end or its account; then there is none."""
    run = RunDirectory(config.directory, config.run)
    given = config.directory / f"{config.run}.json"
    await asyncio.to_thread(write_json, given, json.loads(config.model_dump_json(exclude={"bus"})))
    local = LocalRun(run, ("--config", str(given)), log_name="overlap.log")
    measurement = Measurement(local, config, plan, stop)
    try:
        await local.start()
        failure = await measurement.run()
        found = await asyncio.to_thread(measured, measurement, failure)
        killed = failure is not None and not isinstance(failure, LimitError)
        ended = f"killed: {failure}" if killed else await end_run(local, plan, stop)
    finally:
        await local.kill(patience_s=0)
    counts = None
    if ended == WELL:
        counts, ended = await accounted(config, run, plan, stop)
    return {**found, "cut": None if failure is None else str(failure), "ended": ended, "account": counts}


def measured(measurement: "Measurement", failure: SluiceError | None) -> dict[str, Json]:
    """Return the figures of the turns as far as they came. Raises `SluiceError` if `failure` came before
    any."""
    burst = measurement.config.admission.max_staleness + 1
    turns = trained(measurement.heard, measurement.turns, burst=burst)
    if failure is not None and not turns:
        raise SluiceError(f"nothing was measured: {failure}") from failure
    return figures(measurement.config, measurement.local.run, measurement.heard, turns)


async def end_run(local: LocalRun, plan: Plan, stop: asyncio.Event) -> str:
    """`WELL`, or what was wrong with it: what was measured before is true all the same."""
    left_s = plan.ending_s - plan.elapsed_s()
    log.info("run_ends", at_s=round(plan.elapsed_s(), 1), log=str(local.log))
    ending = asyncio.create_task(local.end(max(0.0, min(END_TIMEOUT_S, left_s))))
    try:
        if await ended_before(stop, ending):
            return WELL
    except SluiceError as error:
        return str(error)
    await cancelled(ending)
    return "killed: stopped while the run ended"


async def accounted(
    config: RunConfig, run: RunDirectory, plan: Plan, stop: asyncio.Event
) -> tuple[dict[str, Json] | None, str]:
    """Return what became of every trajectory, and `WELL`; or None, and why that is not known."""

    def go_on(needs_s: float = 0.0) -> None:
        if stop.is_set():
            raise SluiceError("stopped")
        if plan.limit_s - plan.elapsed_s() < needs_s:
            raise LimitError(f"the limit of {plan.limit_s:g} s leaves no time for it")

    try:
        go_on(ACCOUNT_S)
        return await asyncio.to_thread(account_of, config, run, go_on), WELL
    except SluiceError as error:
        return None, f"no account: {error}"


class Measurement:
    """The turns of a run, as far as they came."""

    def __init__(self, local: LocalRun, config: RunConfig, plan: Plan, stop: asyncio.Event) -> None:
        self.local = local
        self.config = config
        self.turns: list[Turn] = []
        """Turns that have settled; the last one's steps may be yet to come."""
        self.heard = Heard({}, [])
        """Records of the run when they were last read."""
        self._staleness = config.admission.max_staleness
        self._plan = plan
        self._stop = stop
        self._where = "before the first step"

    async def run(self) -> SluiceError | None:
        """Measure all turns; returns what came in between, if anything did."""
        try:
            for mode in self._plan.modes:
                await self._turn(mode)
            last = self.turns[-1].last
            await self.until(lambda heard: heard.has_read_after(last), STEP_TIMEOUT_S)
        except SluiceError as error:
            log.warning("measuring_ends_early", at_s=self._now(), reason=str(error))
            return error
        return None

    async def _turn(self, mode: str) -> None:
        """Change to the mode, let it settle, and train the steps that count."""
        began_s, after, settling, first_s = self._plan.elapsed_s(), self.heard.step, 0, STEP_TIMEOUT_S
        log.info("turn_begins", mode=mode, at_s=self._now(), step=after)
        if not self.turns:
            # what is issued before the first step comes in a burst, and steps of the next still wait for it
            settling = 2 * (self._staleness + 1)
            first_s = START_TIMEOUT_S
        elif mode == self.turns[-1].mode:
            after = self.turns[-1].last
        else:
            bound = self._staleness if mode == "async" else 0
            await self._set_bound(bound)
            settling = bound + 2  # one is under way, and the next one's batch is there
            self._where = f"while {mode} settled, from step {after} on"
        settled = partial(_settled, mode, after + settling)
        first = await self.until(settled, first_s + STEP_TIMEOUT_S * settling, first_s=first_s)
        turn = Turn(mode, first, first + self._plan.steps, after, began_s)
        self.turns.append(turn)
        settled_s = self.heard.step_s(range(after + 1, first + 1))
        log.info("turn_has_settled", mode=mode, at_s=self._now(), step=first, step_s=settled_s)
        self._where = f"while {mode} was measured, from step {first} on"
        await self.until(lambda heard: heard.step >= turn.last, STEP_TIMEOUT_S * self._plan.steps)
        step_s = self.heard.step_s(turn.steps)
        log.info("turn_ends", mode=mode, at_s=self._now(), step=turn.last, step_s=step_s)

    async def _set_bound(self, max_staleness: int) -> None:
        settings = json.loads(self.local.run.config.read_text())
        settings["admission"]["max_staleness"] = max_staleness
        await self.local.restart_storage(settings)

    async def until(
        self, found: Callable[[Heard], int], limit_s: float, *, first_s: float = STEP_TIMEOUT_S
    ) -> int:
        """Return what is `found` in what the run has said, as soon as it is not 0.

        Raises `LimitError` at the plan's limit, and `SluiceError` after `limit_s`, after `first_s` or later
        `STEP_TIMEOUT_S` without a step, on `stop`, or when the run has given up."""
        began = time.monotonic()
        quiet, step = began + first_s, -1
        while True:
            self.local.raise_if_ended()
            await self._listen()
            if it := found(self.heard):
                return it
            now = time.monotonic()
            if self.heard.step > step:
                quiet, step = max(quiet, now + STEP_TIMEOUT_S), self.heard.step
            logs = f"see {self.local.log}, {self.local.run.logs}"
            left_s = self._plan.measuring_s - self._plan.elapsed_s()
            if left_s <= 0:
                limit = f"the limit of {self._plan.limit_s:g} s"
                raise LimitError(f"{limit} came {self._where}, and step {step} was the last: {logs}")
            if self._stop.is_set():
                raise SluiceError(f"stopped {self._where}, and step {step} was the last: {logs}")
            if now > min(quiet, began + limit_s):
                raise SluiceError(f"waited {now - began:.0f} s, and step {step} was the last: {logs}")
            await set_within(self._stop, min(POLL_S, left_s))

    async def _listen(self) -> None:
        before = self.heard.step
        self.heard = await asyncio.to_thread(Heard.of, self.local.run)
        if before == 0 and self.heard.step > 0:
            self._where = "before the first turn had settled"
            log.info("first_step_trained", at_s=self._now(), step_s=self.heard.step_s([1]))

    def _now(self) -> float:
        return round(self._plan.elapsed_s(), 1)


def _settled(mode: str, earliest: int, heard: Heard) -> int:
    """Return the first step from `earliest` on by which what began under another bound is over; 0 before it.

    A single step may be on-policy by chance: each burst begins with one. The actors' counters must have been
    heard by that step, or nothing says how much of them came before it."""
    on_policy = {step for step in heard.steps if staleness(heard, step) == 0}
    steps = (step for step in heard.steps if step >= earliest and heard.has_read_before(step))
    return min((step for step in steps if mode == "async" or {step - 1, step} <= on_policy), default=0)
