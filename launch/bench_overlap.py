"""What asynchrony is worth: one real run, in turns as configured and held synchronous, and who waits in each.

Bus, storage, learner and actors are the processes of `launch local`. Only storage is started again, with
another bound on staleness, when the mode changes; so engine and learner stay warm, and both modes have the
same weights, lengths and machine. The steps after a change do not count."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

import numpy as np

from actors.config import EmbeddedEngineConfig
from bus.codec import Json
from bus.errors import SluiceError
from bus.waiting import set_within
from launch.account import account
from launch.config import RunConfig
from launch.harm import Victim
from launch.metrics import Record, number, read_records, whole
from launch.past_ledger import states_of
from storage.files import write_json
from storage.run import RunDirectory

MODES = ("async", "sync")
WELL = "well"
LIMITS: dict[str, Json] = {"async_over_sync": 2.0, "learner_idle": 0.05, "engine_idle": 0.05}
"""The first at least, the others at most; wanted with a GPU for each side. `slots_idle` has none."""
START_TIMEOUT_S = 1500.0
"""Until the first step: the first start of a server on a GPU compiles kernels."""
STEP_TIMEOUT_S = 600.0
POLL_S = 0.5


@dataclass(frozen=True)
class Plan:
    """How long is measured."""

    steps: int
    """Measured in each turn, after those in which the mode settles."""
    rounds: int
    """Each is a turn of one mode, then one of the other; every other round begins with the other."""

    @property
    def modes(self) -> list[str]:
        """Of all turns."""
        return [mode for n in range(self.rounds) for mode in (MODES if n % 2 == 0 else reversed(MODES))]


@dataclass(frozen=True)
class Turn:
    """Steps in one mode: from the end of step `first` to the end of step `last`."""

    mode: str
    first: int
    last: int


@dataclass
class Heard:
    """What a run has said so far."""

    steps: dict[int, Record]
    """Of the learner, by number."""
    readings: list[Record]
    """Of the actors' process, in order of time."""

    @classmethod
    def of(cls, run: RunDirectory) -> Self:
        """Read the run's record. Raises `SluiceError` when learner or actors were started again."""
        heard = cls({}, [])
        for record in read_records(run.metrics):
            if record.get("train/stage") == "rl":
                step = whole(record, "step")
                if heard.steps.setdefault(step, record) != record:  # equal ones are one, sent twice
                    raise SluiceError(f"step {step} was trained twice, so the learner died: see {run.logs}")
            elif "engine/busy_s" in record:
                heard.readings.append(record)
        sources = {str(reading["source"]) for reading in heard.readings}
        if len(sources) > 1:
            raise SluiceError(f"actors were started again ({', '.join(sorted(sources))}): see {run.logs}")
        heard.readings.sort(key=lambda reading: number(reading, "time_s"))
        return heard

    @property
    def step(self) -> int:
        """The latest; 0 before the first."""
        return max(self.steps, default=0)

    def ended_s(self, step: int) -> float:
        """When a step ended, in seconds since the epoch."""
        return number(self.steps[step], "time_s")

    def has_read_after(self, step: int) -> bool:
        """Whether the actors have told their counters since the end of a step."""
        return bool(self.readings) and number(self.readings[-1], "time_s") >= self.ended_s(step)

    def counted(self, name: str, turn: Turn) -> float:
        """How much a counter of the actors grew in a turn."""
        span = self.ended_s(turn.first), self.ended_s(turn.last)
        times, values = ([number(reading, key) for reading in self.readings] for key in ("time_s", name))
        began, ended = np.interp(span, times, values)
        return float(ended - began)

    @property
    def engines(self) -> int:
        """How many the actors have."""
        return whole(self.readings[-1], "engine/count")


async def bench_overlap(config: RunConfig, plan: Plan, stop: asyncio.Event) -> dict[str, Json]:
    """Measure; raises `SluiceError` when the run does not train, or on `stop`.

    The report's "ended" is "well", or what was wrong with the run's end; then there is no account."""
    run = RunDirectory(config.directory, config.run)
    given = config.directory / f"{config.run}.json"
    await asyncio.to_thread(write_json, given, json.loads(config.model_dump_json(exclude={"bus"})))
    local = Victim(run, ("--config", str(given)), random.Random(0), log_name="overlap.log")
    turns: list[Turn] = []
    try:
        await local.start()
        for mode in plan.modes:
            turns.append(await _turn(local, config, plan, mode, stop, begins=not turns))
        last = turns[-1].last
        heard = await _until(local, lambda heard: heard.has_read_after(last), stop, STEP_TIMEOUT_S)
        figures = await asyncio.to_thread(_figures, config, run, heard, turns)
        ended = await _end(local)
    finally:
        await local.kill()
    counts = await asyncio.to_thread(_account, config, run) if ended == WELL else None
    return {**figures, "ended": ended, "account": counts}


async def _end(local: Victim) -> str:
    """`WELL`, or what was wrong with it: what was measured before is true all the same."""
    try:
        await local.end()
    except SluiceError as error:
        return str(error)
    return WELL


async def _turn(
    local: Victim, config: RunConfig, plan: Plan, mode: str, stop: asyncio.Event, *, begins: bool
) -> Turn:
    """Change to the mode, let it settle, and train the steps that count."""
    bound = config.admission.max_staleness if mode == "async" else 0
    if not begins:
        await asyncio.to_thread(_set_bound, local.run, bound)
        local.terminate("storage")
    now = (await asyncio.to_thread(Heard.of, local.run)).step
    settled = now + bound + 2
    start_s = START_TIMEOUT_S if begins else STEP_TIMEOUT_S
    heard = await _until(
        local,
        lambda heard: heard.step >= settled and (mode == "async" or _on_policy(heard, heard.step)),
        stop,
        start_s + STEP_TIMEOUT_S * (bound + 2),
        first_s=start_s,
    )
    turn = Turn(mode, heard.step, heard.step + plan.steps)
    await _until(local, lambda heard: heard.step >= turn.last, stop, STEP_TIMEOUT_S * plan.steps)
    return turn


def _set_bound(run: RunDirectory, max_staleness: int) -> None:
    """What storage reads when it starts again."""
    config = json.loads(run.config.read_text())
    config["admission"]["max_staleness"] = max_staleness
    write_json(run.config, config)


async def _until(
    local: Victim,
    found: Callable[[Heard], bool],
    stop: asyncio.Event,
    limit_s: float,
    *,
    first_s: float = STEP_TIMEOUT_S,
) -> Heard:
    """What the run has said when it is `found`.

    Raises `SluiceError` after `limit_s`, after `first_s` or later `STEP_TIMEOUT_S` without a step, and on
    `stop`."""
    began = time.monotonic()
    quiet, step = began + first_s, -1
    while True:
        local.refuse_end()
        heard = await asyncio.to_thread(Heard.of, local.run)
        if found(heard):
            return heard
        now = time.monotonic()
        if heard.step > step:
            quiet, step = max(quiet, now + STEP_TIMEOUT_S), heard.step
        if now > min(quiet, began + limit_s):
            raise SluiceError(
                f"waited {now - began:.0f} s, and step {step} was the last: see {local.log}, {local.run.logs}"
            )
        if await set_within(stop, POLL_S):
            raise SluiceError("stopped before everything was measured")


def _on_policy(heard: Heard, step: int) -> bool:
    """Whether it and the step before were: what began under another bound is over."""
    return all(earlier in heard.steps and _staleness(heard, earlier) == 0 for earlier in (step - 1, step))


def _staleness(heard: Heard, step: int) -> float:
    return number(heard.steps[step], "staleness/max_versions")


# --- the report ---


def _figures(config: RunConfig, run: RunDirectory, heard: Heard, turns: Sequence[Turn]) -> dict[str, Json]:
    if missing := set(_steps(turns)) - set(heard.steps):
        raise SluiceError(f"{run.metrics} lacks steps {sorted(missing)}: was a process killed?")
    rates = {mode: [_rate(heard, turn) for turn in turns if turn.mode == mode] for mode in MODES}
    modes = {mode: _mode(config, heard, [turn for turn in turns if turn.mode == mode]) for mode in MODES}
    asynchronous, synchronous = (modes[mode] for mode in MODES)
    admission = config.admission
    return {
        "ratios": {
            "async_over_sync": median(a / s for a, s in zip(rates["async"], rates["sync"], strict=True)),
            "learner_idle": asynchronous["learner_idle"],
            "engine_idle": asynchronous["engine_idle"],
            "slots_idle": asynchronous["slots_idle"],
        },
        "limits": LIMITS,
        "limited_by": {
            "async_over_sync": "the side that has more to do",
            "learner_idle": "where the engine is the busier side, the learner waits for it",
            "engine_idle": "where the learner is, the bound on staleness stops the engine",
            "slots_idle": "a long tail of lengths: few requests are left while an engine is not idle yet",
        },
        "modes": {mode: dict(figures) for mode, figures in modes.items()},
        "absolute": {
            "async_over_sync_tokens": asynchronous["trained_tokens_per_s"]
            / synchronous["trained_tokens_per_s"],
            "turns": [[turn.mode, turn.first, turn.last, _rate(heard, turn)] for turn in turns],
            "engines": heard.engines,
            "requests_at_most": _slots(config, heard),
            "max_staleness": admission.max_staleness,
            "trajectories_per_step": admission.groups_per_step * admission.samples_per_prompt,
        },
    }


def _account(config: RunConfig, run: RunDirectory) -> dict[str, Json]:
    """What became of every trajectory."""
    admission, samples = config.admission, config.admission.samples_per_prompt
    states = [state for state, _ in states_of(run.ledger).values()]
    counts = account(run, shards=config.replay.shards, samples=samples, max_staleness=admission.max_staleness)
    return counts | {"rejected": states.count("rejected") * samples}


def _rate(heard: Heard, turn: Turn) -> float:
    """Trajectories trained per second."""
    return _summed(heard, "train/trajectories", [turn]) / _wall_s(heard, [turn])


def _mode(config: RunConfig, heard: Heard, turns: Sequence[Turn]) -> dict[str, float]:
    """The figures of all turns of one mode."""
    wall_s = _wall_s(heard, turns)
    steps = sum(turn.last - turn.first for turn in turns)
    waited_s = _summed(heard, "time/waiting_for_batch_s", turns)
    busy_s, request_s, tokens = (
        sum(heard.counted(f"engine/{name}", turn) for turn in turns)
        for name in ("busy_s", "request_s", "tokens")
    )
    return {
        "steps": steps,
        "step_s": wall_s / steps,
        "trajectories_per_s": _summed(heard, "train/trajectories", turns) / wall_s,
        "trained_tokens_per_s": _summed(heard, "train/tokens", turns) / wall_s,
        "generated_tokens_per_s": tokens / wall_s,
        "learner_idle": waited_s / wall_s,
        "engine_idle": _idle(busy_s / (wall_s * heard.engines)),
        "slots_idle": _idle(request_s / (wall_s * _slots(config, heard))),
        "learner_busy_s_per_step": (wall_s - waited_s) / steps,
        "engine_busy_s_per_step": busy_s / heard.engines / steps,
        "publish_stall_s_per_step": _summed(heard, "time/publish_stall_s", turns) / steps,
        "staleness_max": max(_staleness(heard, step) for step in _steps(turns)),
        "staleness_mean": _summed(heard, "staleness/mean_versions", turns) / steps,
    }


def _idle(busy: float) -> float:
    """The rest of a share; between two readings a counter is guessed, so it may be a little over 1."""
    return 1 - busy if busy > 1.1 else max(0.0, 1 - busy)


def _slots(config: RunConfig, heard: Heard) -> int:
    """Requests that all engines may have at once."""
    fleet, engine = config.actors.fleet, config.actors.engine
    own = engine.slots if isinstance(engine, EmbeddedEngineConfig) else fleet.requests_per_engine
    return heard.engines * min(own, fleet.requests_per_engine)


def _steps(turns: Iterable[Turn]) -> list[int]:
    return [step for turn in turns for step in range(turn.first + 1, turn.last + 1)]


def _summed(heard: Heard, name: str, turns: Iterable[Turn]) -> float:
    return sum(number(heard.steps[step], name) for step in _steps(turns))


def _wall_s(heard: Heard, turns: Iterable[Turn]) -> float:
    return sum(heard.ended_s(turn.last) - heard.ended_s(turn.first) for turn in turns)
