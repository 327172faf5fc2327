"""The way of a run's data from prompts to weights: what each place does, its rates and its queue."""

from collections.abc import Mapping
from typing import Literal

from bus.codec import Json
from bus.messages import Status
from bus.topology import TRAJECTORIES
from launch.run_view.run_status import RunState
from launch.run_view.status_texts import engine_texts, holders_text
from launch.run_view.units import UNKNOWN, count, duration
from launch.run_view.waiting_reasons import full_streams, waiting_actors
from launch.screens.status_report import known, report
from storage.metrics.records import integer, number

Condition = Literal["works", "waits", "trouble", "silent"]


def flow(state: RunState) -> list[Json]:
    """Return the places in the order of the data, each as an object. Its keys: name, condition, doing (a
    phrase), figures (pairs of value and label), queue (label, used and bound, or null), out (the rate at
    which data leaves it, or an empty text)."""
    found = report(state)
    return [
        _prompts(state),
        _actors(state, found),
        _store(state, found),
        _learner(state, found),
        _weights(state, found),
    ]


def _place(
    name: str, condition: Condition, doing: str, figures: list[tuple[str, str]],
    queue: tuple[str, int, int] | None = None, out: str = "",
) -> dict[str, Json]:  # fmt: skip
    shown: Json = None if queue is None else dict(zip(("label", "used", "bound"), queue, strict=True))
    return {
        "name": name,
        "condition": condition,
        "doing": doing,
        "figures": [[value, label] for value, label in figures],
        "queue": shown,
        "out": out,
    }


def _prompts(state: RunState) -> Json:
    values, rollout = state.monitor.values("storage"), state.consumers.get("TASKS/rollout")
    waiting = UNKNOWN if rollout is None else count(rollout.num_pending or 0)
    out = integer(values, "rolling_out") + integer(values, "stored")
    return _place(
        "Prompts",
        _condition(state, "storage"),
        _doing(state, "storage"),
        [(waiting, "leases wait for actors"), (_count(values, "issued"), "groups issued")],
        ("groups under way, of what the staleness bound allows", out, _allowed(state)) if values else None,
    )


def _allowed(state: RunState) -> int:
    if state.config is None:
        return 0
    bound = state.monitor.values("storage").get("max_staleness", state.config.admission.max_staleness)
    return (int(bound) + 1) * state.config.admission.groups_per_step if isinstance(bound, int) else 0


def _actors(state: RunState, found: Mapping[str, Json]) -> Json:
    actors = state.of_role("actor")
    running = sum(integer(one.values, "running") for one in actors)
    queued = sum(integer(one.values, "waiting") for one in actors)
    waiting = next(waiting_actors(state), "")
    condition: Condition = "waits" if waiting else "works"
    if not actors:
        condition = "silent"
    if any(one.values.get("alarm") for one in actors):
        condition = "trouble"
    doing = waiting or ("generating" if running else holders_text(actors))
    return _place(
        "Actors and engines",
        condition,
        doing if actors else "no actor was heard",
        [
            (str(len(actors)), "actor was heard" if len(actors) == 1 else "actors were heard"),
            (count(running) if actors else UNKNOWN, "requests run in engines"),
            (count(queued) if actors else UNKNOWN, "requests queue for a slot"),
            *engine_texts([one.values for one in actors]),
        ],
        out=_per_s(found, "generated_tokens_per_minute", "tokens/s sampled"),
    )


def _store(state: RunState, found: Mapping[str, Json]) -> Json:
    values = state.monitor.values("storage")
    waiting = [info.state.messages for name, info in state.streams.items() if name.startswith(TRAJECTORIES)]
    pending = count(sum(waiting)) if waiting else UNKNOWN
    full = any(full_streams(state))
    doing = "storing what arrives" if "storage" in state.statuses else _doing(state, "storage")
    wanted = 0 if state.config is None else state.config.admission.groups_per_step
    return _place(
        "Replay store",
        "trouble" if full else _condition(state, "storage"),
        "a stream to it is full" if full else doing,
        [(pending, "results on the bus"), (_count(values, "rejected"), "groups rejected")],
        ("complete groups, of what a step needs", integer(values, "stored"), wanted) if values else None,
        out=_per_s(found, "trained_tokens_per_minute", "tokens/s trained"),
    )


def _learner(state: RunState, found: Mapping[str, Json]) -> Json:
    versions, last = _table(found, "versions"), state.monitor.history.last
    rate = number(_table(found, "rates"), "steps_per_minute")
    figures = [(f"{known(versions.get('trained_step'))} of {known(versions.get('steps'))}", "steps trained")]
    if last is not None:
        figures += [
            (duration(last.step_s), "the last step took"),
            (duration(last.waiting_s), "of which the learner waited"),
        ]
    if state.trained_s is not None:
        figures.append((duration(max(0, round(state.asked_s - state.trained_s))), "since the newest step"))
    return _place(
        "Learner",
        _condition(state, "learner"),
        _doing(state, "learner", whole=False),
        figures,
        out=f"{rate:.1f} steps/min" if rate == rate else "",
    )


def _weights(state: RunState, found: Mapping[str, Json]) -> Json:
    versions, staleness = _table(found, "versions"), _table(found, "staleness")
    published, oldest = versions.get("published"), versions.get("oldest_in_use")
    unheard = not state.of_role("actor") and (state.config is None or state.config.has_rollouts)
    doing = (
        "no actor was heard: which weights engines have is not known"
        if unheard
        else "nothing is published yet"
    )
    if published is not None and not unheard:
        lag = number(versions, "published") - number(versions, "oldest_in_use")
        behind = f"the oldest is {lag:.0f} {'version' if lag == 1 else 'versions'} behind"
        doing = "no engine has weights yet" if oldest is None else behind if lag else "every engine has them"
    last = staleness.get("last_step")
    label = "staleness of the last step, of what is allowed"
    return _place(
        "Weights",
        "silent" if published is None or unheard else "works",
        doing,
        [(_version(published), "published"), (_version(oldest), "oldest in an engine")],
        None if last is None else (label, integer(staleness, "last_step"), integer(staleness, "bound")),
    )


def _condition(state: RunState, source: str) -> Condition:
    status = state.statuses.get(source)
    if status is None:
        return "silent"
    if status.not_storing:
        return "trouble"
    return "waits" if status.waits else "works"


def _doing(state: RunState, source: str, *, whole: bool = True) -> str:
    status: Status | None = state.statuses.get(source)
    if status is None:
        since = state.silent_since("dispatcher" if source == "storage" else source)
        return f"{source} was not heard{since and f', {since}'}"
    return status.text if whole else status.doing


def _table(found: Mapping[str, Json], name: str) -> Mapping[str, Json]:
    table = found.get(name)
    return table if isinstance(table, dict) else {}


def _count(values: Mapping[str, Json], name: str) -> str:
    return count(integer(values, name)) if name in values else UNKNOWN


def _version(value: Json) -> str:
    return UNKNOWN if value is None else f"v{value}"


def _per_s(found: Mapping[str, Json], name: str, unit: str) -> str:
    rate = number(_table(found, "rates"), name)
    return f"{count(rate / 60)} {unit}" if rate == rate else ""
