"""The report of `launch bench overlap`, computed from the records of the measured turns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

from actors.settings.engines import EmbeddedEngineConfig
from benchmarks.overlap_record import Heard, Turn
from bus.codec import Json
from bus.errors import SluiceError
from launch.settings.run_config import RunConfig
from soak.lease_states import states_of
from soak.trajectory_account import account
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import number

MODES = ("async", "sync")
LIMITS: dict[str, Json] = {"async_over_sync": 2.0, "learner_idle": 0.05, "engine_idle": 0.05}
"""The first at least, the others at most; wanted with a GPU for each side. `slots_idle` has none."""
ENOUGH_STEPS = 2
"""Fewest steps that make a synchronous turn count that was cut."""


def trained(heard: Heard, turns: Sequence[Turn], *, burst: int) -> list[Turn]:
    """Return the turns with the steps of which everything is known, those with enough of them to count.

    Of an asynchronous turn that was cut whole bursts count, of `burst` steps each: within one, the first step
    waits for all. Of a synchronous one `ENOUGH_STEPS` do, or more."""
    known = max((step for step in heard.steps if heard.has_read_after(step)), default=0)
    cut = (turn if turn.last <= known else _cut(turn, known - turn.first, burst) for turn in turns)
    return [turn for turn in cut if turn.steps]


def _cut(turn: Turn, steps: int, burst: int) -> Turn:
    """Return what counts of a turn of which only so many steps are known; it may be none."""
    if turn.mode == "async":
        steps -= steps % burst
    elif steps < ENOUGH_STEPS:
        steps = 0
    return replace(turn, last=turn.first + steps, cut=True)


def figures(config: RunConfig, run: RunDirectory, heard: Heard, turns: Sequence[Turn]) -> dict[str, Json]:
    """Return what was measured; null is what needs turns of a mode that has none. Raises `SluiceError` on
    gaps."""
    if missing := {step for turn in turns for step in turn.steps} - set(heard.steps):
        raise SluiceError(f"{run.metrics} lacks steps {sorted(missing)}: was a process killed?")
    in_mode = {mode: [turn for turn in turns if turn.mode == mode] for mode in MODES}
    modes = {mode: _mode(config, heard, those) for mode, those in in_mode.items() if those}
    pairs = zip(*in_mode.values(), strict=False)  # of a run that was cut one mode has a turn more
    ratios = [_rate(heard, one) / _rate(heard, other) for one, other in pairs]
    tokens = [modes[mode]["trained_tokens_per_s"] for mode in modes]
    idle = modes.get("async", {})
    admission = config.admission
    return {
        "ratios": {
            "async_over_sync": median(ratios) if ratios else None,
            **{name: idle.get(name) for name in ("learner_idle", "engine_idle", "slots_idle")},
        },
        "limits": LIMITS,
        "limited_by": {
            "async_over_sync": "the side that has more to do",
            "learner_idle": "where the engine is the busier side, the learner waits for it",
            "engine_idle": "where the learner is, the bound on staleness stops the engine",
            "slots_idle": "a long tail of lengths: few requests are left while an engine is not idle yet",
        },
        "modes": {mode: dict(modes[mode]) if mode in modes else None for mode in MODES},
        "absolute": {
            "async_over_sync_tokens": tokens[0] / tokens[1] if ratios else None,
            "turns": [_turn_figures(heard, turn) for turn in turns],
            "engines": heard.engines,
            "requests_at_most": _slots(config, heard),
            "max_staleness": admission.max_staleness,
            "trajectories_per_step": admission.groups_per_step * admission.samples_per_prompt,
        },
    }


def account_of(config: RunConfig, run: RunDirectory, go_on: Callable[[], None]) -> dict[str, Json]:
    """Return what became of every trajectory of a run that has ended well; `account` says what is raised."""
    shards, samples = config.replay.shards, config.admission.samples_per_prompt
    bound = config.admission.max_staleness
    counts = account(run, shards=shards, samples=samples, max_staleness=bound, go_on=go_on)
    states = [state for state, _ in states_of(run.ledger).values()]
    return counts | {"rejected": states.count("rejected") * samples}


def staleness(heard: Heard, step: int) -> float:
    """Return the worst of a step, in versions."""
    return number(heard.steps[step], "staleness/max_versions")


def _turn_figures(heard: Heard, turn: Turn) -> dict[str, Json]:
    return {
        "mode": turn.mode,
        "began_s": round(turn.began_s, 1),
        "settling_steps": turn.first - turn.after,
        "settling_s": round(sum(heard.step_s(range(turn.after + 1, turn.first + 1))), 1),
        "first": turn.first,
        "last": turn.last,
        "cut": turn.cut,
        "step_s": list(heard.step_s(turn.steps)),
        "trajectories_per_s": _rate(heard, turn),
    }


def _rate(heard: Heard, turn: Turn) -> float:
    """Return the trajectories trained per second."""
    return _summed(heard, "train/trajectories", [turn]) / _wall_s(heard, [turn])


def _mode(config: RunConfig, heard: Heard, turns: Sequence[Turn]) -> dict[str, float]:
    """Return the figures of all turns of one mode."""
    wall_s = _wall_s(heard, turns)
    steps = sum(len(turn.steps) for turn in turns)
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
        "staleness_max": max(staleness(heard, step) for turn in turns for step in turn.steps),
        "staleness_mean": _summed(heard, "staleness/mean_versions", turns) / steps,
    }


def _idle(busy: float) -> float:
    """Return the rest of a share; between two readings a counter is guessed, so it may be a little over 1."""
    return 1 - busy if busy > 1.1 else max(0.0, 1 - busy)


def _slots(config: RunConfig, heard: Heard) -> int:
    """Return the number of requests that all engines may have at once."""
    fleet, engine = config.actors.fleet, config.actors.engine
    own = engine.slots if isinstance(engine, EmbeddedEngineConfig) else fleet.requests_per_engine
    return heard.engines * min(own, fleet.requests_per_engine)


def _summed(heard: Heard, name: str, turns: Iterable[Turn]) -> float:
    return sum(number(heard.steps[step], name) for turn in turns for step in turn.steps)


def _wall_s(heard: Heard, turns: Iterable[Turn]) -> float:
    return sum(heard.ended_s(turn.last) - heard.ended_s(turn.first) for turn in turns)
