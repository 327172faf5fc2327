"""The status of a run as one JSON object, and as a screen of 80 columns made from it."""

import textwrap
from collections.abc import Iterator, Mapping
from math import isnan
from typing import Any

from bus.actor_counters import failed_fraction
from bus.messages import Status
from launch.run_view.run_status import RunState
from launch.run_view.status_texts import best_text, ends_text, engines_of, policy_text
from launch.run_view.units import UNKNOWN, duration, per_time, since, size
from launch.run_view.waiting_reasons import problems, waits
from storage.metrics.records import integer

WIDTH = 80
LABEL = 11
SHOWN_MEMBERS = 12
"""Most members that the screen has a line for; the JSON object has all."""
Report = dict[str, Any]
"""JSON object whose keys docs/operations.md describes."""


def report(state: RunState) -> Report:
    """Return the object that `launch status --json` prints. What nobody told is null."""
    missing = problems(state)
    return {
        "run": state.run,
        "time_s": state.asked_s,
        "healthy": not missing,
        "state": state.state,
        "stage": state.stage,
        "waiting": None if state.waiting is None else state.waiting.model_dump(),
        "from_run": None if state.config is None else state.config.model.from_run,
        "problems": missing,
        "waits": waits(state),
        "members": [*map(_member, _ordered(state)), *_silent(state)],
        "versions": _versions(state),
        "policies": state.monitor.policies,
        "best": state.monitor.values("learner").get("best"),
        "leases": _leases(state),
        "episodes": _episodes(state),
        "streams": {
            name: {
                "messages": info.state.messages,
                "bytes": info.state.bytes,
                "bytes_max": info.config.max_bytes if (info.config.max_bytes or 0) > 0 else None,
            }
            for name, info in sorted(state.streams.items())
        },
        "consumers": {
            name: {"waiting": info.num_pending, "out": info.num_ack_pending}
            for name, info in sorted(state.consumers.items())
        },
        "rates": _rates(state),
        "staleness": _staleness(state),
    }


def _ordered(state: RunState) -> list[Status]:
    order = {"storage": 0, "shards": 1, "learner": 2, "actor": 4}
    return sorted(state.statuses.values(), key=lambda one: (order.get(one.role, 3), one.source))


def _member(status: Status) -> Report:
    values = status.values
    return {
        "source": status.source,
        "role": status.role,
        "state": "alive",
        "host": status.host,
        "pid": status.pid,
        "since_s": status.started_s or None,
        "doing": status.text,
        "wait": status.wait or None,
        "revision": status.revision or None,
        "policy_version": values.get("policy_version") if status.role in ("actor", "learner") else None,
        "engines": values.get("engines") if status.role == "actor" else None,
    }


def _silent(state: RunState) -> Iterator[Report]:
    heard = {(status.host, status.pid) for status in state.statuses.values()}
    for role, holder in sorted(state.holders.items()):
        if (holder.host, holder.pid) not in heard:
            renewed = role in state.renewed
            yield {
                "source": role,
                "role": role.partition("-")[0],
                "state": "busy" if renewed else "silent",
                "host": holder.host,
                "pid": holder.pid,
                "since_s": None if renewed else state.renewed_s.get(role),
                "doing": "renews its role, but sends no status" if renewed else "sends nothing",
                **dict.fromkeys(("wait", "revision", "policy_version", "engines")),
            }


def _versions(state: RunState) -> Report:
    policy, learner = state.policy, state.monitor.values("learner")
    used = list(_versions_in_use(state))
    trained = learner.get("step")
    if trained is None and policy is not None and policy.stage != "warmup":
        trained = policy.policy_version - policy.trains_from
    return {
        "published": None if policy is None else policy.policy_version,
        "trained_step": trained,
        "steps": None if state.config is None else state.config.learner.steps,
        "oldest_in_use": min(used, default=None),
    }


def _versions_in_use(state: RunState) -> Iterator[int]:
    """Return the version of each engine, or of an actor that names no engines."""
    for actor in state.of_role("actor"):
        for values in engines_of(actor.values).values() or [actor.values]:
            if "policy_version" in values and integer(values, "policy_version") >= 0:
                yield integer(values, "policy_version")


def _leases(state: RunState) -> Report:
    storage, rollout = state.monitor.values("storage"), state.consumers.get("TASKS/rollout")
    return {
        "waiting": None if rollout is None else rollout.num_pending,
        "out": None if rollout is None else rollout.num_ack_pending,
        "stored_groups": storage.get("stored"),
        "trained_groups": storage.get("trained"),
        "rejected_groups": storage.get("rejected"),
        "issued": storage.get("issued"),
    }


def _episodes(state: RunState) -> Report:
    """Return how recent episodes ended, and the fractions that failed by anything, and by infrastructure."""
    ends = state.monitor.recent_ends
    return {
        "recent_ends": ends,
        "failed_fraction": failed_fraction(ends),
        "infra_failed_fraction": failed_fraction(ends, "infrastructure"),
    }


def _rates(state: RunState) -> Report:
    """Return rates over the learner's recent steps; tokens are those of the last second or step."""
    steps = [*state.monitor.history.steps.values()]
    per_minute = trajectories = None
    if len(steps) > 1 and (seconds := steps[-1].time_s - steps[0].time_s) > 0:
        per_minute = 60 * (len(steps) - 1) / seconds
        trajectories = 60 * sum(one.trajectories for one in steps[1:]) / seconds
    trained, generated = state.monitor.trained_tokens_per_s, state.monitor.generated_tokens_per_s
    return {
        "steps_per_minute": per_minute,
        "trained_trajectories_per_minute": trajectories,
        "generated_tokens_per_minute": 60 * generated if generated == generated else None,
        "trained_tokens_per_minute": 60 * trained if trained == trained else None,
        "until_s": state.trained_s,
    }


def _staleness(state: RunState) -> Report:
    storage, learner = state.monitor.values("storage"), state.monitor.values("learner")
    last = state.monitor.history.last
    configured = None if state.config is None else state.config.admission.max_staleness
    return {
        "last_step": None if last is None or isnan(last.staleness_max) else int(last.staleness_max),
        "worst": learner.get("max_staleness_seen"),
        "bound": storage.get("max_staleness", configured),
    }


# --- the screen ---


def screen(found: Report) -> str:
    lines = [f"{found['run']}  {found['stage']}  {'healthy' if found['healthy'] else 'NOT HEALTHY'}"]
    lines += [line for problem in found["problems"] for line in _row("problem", problem, most=8)]
    lines += [line for wait in found["waits"] or ["nobody waits"] for line in _row("waiting", wait)]
    for label, text in _figures(found):
        lines += _row(label, text)
    members = found["members"]
    for member in members[:SHOWN_MEMBERS]:
        lines += _row("member", _member_line(member, found["time_s"]))
    if len(members) > SHOWN_MEMBERS:
        lines += _row("member", f"... and {len(members) - SHOWN_MEMBERS} more: --json has all")
    return "\n".join(lines)


def _row(label: str, text: str, most: int = 3) -> list[str]:
    """Return the text in at most so many lines. A problem has more: the end of a failure says its cause."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL, max_lines=most
    )


def _figures(found: Report) -> Iterator[tuple[str, str]]:
    versions, rates = found["versions"], found["rates"]
    trains_on_rollouts = versions["steps"] != 0
    in_use = f"{known(versions['published'])} published, {known(versions['oldest_in_use'])} oldest in use"
    step = f"; step {known(versions['trained_step'])} of {known(versions['steps'])} trained"
    yield "versions", in_use + (step if trains_on_rollouts else "")
    if found["from_run"]:
        yield "began with", f"weights of run {found['from_run']}"
    for name, policy in found["policies"].items():
        yield name[: LABEL - 1], policy_text(policy)
    if trains_on_rollouts:
        yield from _figures_of_rollouts(found)
    if best := best_text(found["best"]):
        yield "best", best
    names = ("steps", "trained_trajectories", "generated_tokens", "trained_tokens")
    steps, trajectories, generated, trained = (per_time(rates[f"{name}_per_minute"]) for name in names)
    until_s = rates["until_s"]
    newest = "" if until_s is None else f"; newest step at {since(until_s, found['time_s'])}"
    tokens = f"{generated} generated, {trained} trained"
    yield "a minute", f"{steps} steps, {trajectories} trajectories trained, tokens: {tokens}{newest}"
    full = (f"{name} {_fill(stream)}" for name, stream in found["streams"].items())
    yield "streams", ", ".join(full) or UNKNOWN
    waiting = (f"{name} {one['waiting']}+{one['out']}" for name, one in found["consumers"].items())
    yield "pending", ", ".join(waiting) or UNKNOWN


def _figures_of_rollouts(found: Report) -> Iterator[tuple[str, str]]:
    staleness = {name: known(value) for name, value in found["staleness"].items()}
    leases = {name: known(value) for name, value in found["leases"].items()}
    last, worst, bound = staleness["last_step"], staleness["worst"], staleness["bound"]
    yield "staleness", f"{last} in the last step, {worst} worst, {bound} allowed"
    groups = ", ".join(f"{leases[f'{state}_groups']} {state}" for state in ("stored", "trained", "rejected"))
    yield "leases", f"{leases['waiting']} waiting, {leases['out']} out; groups: {groups}"
    yield "episodes", ends_text(found["episodes"]["recent_ends"])


def _fill(stream: Mapping[str, Any]) -> str:
    bound = stream["bytes_max"]
    return f"{size(stream['bytes'])} of {size(bound)}" if bound else size(stream["bytes"])


def known(value: object) -> str:
    return UNKNOWN if value is None else str(value)


def _member_line(member: Mapping[str, Any], now_s: float) -> str:
    version = member["policy_version"]
    began_s, so_far = member["since_s"], ""
    if began_s is not None:
        is_silent = member["state"] == "silent"
        so_far = (
            f" since {since(began_s, now_s)}" if is_silent else f" for {duration(max(0.0, now_s - began_s))}"
        )
    at = f"{member['source']} {member['state']}{so_far} on {member['host']}, pid {member['pid']}"
    return f"{at}{'' if version is None else f', version {version}'}: {member['doing']}"
