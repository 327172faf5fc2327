"""What the statuses of processes say, in the words that all screens share."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite

from bus.actor_counters import failed_by, failed_fraction
from bus.codec import Json
from bus.messages import Status
from launch.run_view.units import UNKNOWN, count, duration, fraction, per_time, share
from storage.metrics.records import integer, number

ENGINE_FIGURES = {
    "kv_used_fraction": "of the KV cache used",
    "prefix_hit_fraction": "of prompt tokens cached",
    "accepted_tokens_per_pass": "tokens accepted a pass",
}
"""Label of what an actor's engines tell of their caches and drafts, by its name in the status."""
NOTHING_HELD = "no actor runs a rollout: leases wait to be taken, or results to be stored"


def best_text(best: Json) -> str:
    """Return what the learner says of its best checkpoint, for a human; empty if it names none."""
    if not isinstance(best, dict):
        return ""
    value, version, step = number(best, "value"), integer(best, "policy_version"), integer(best, "step")
    return f"{fraction(value)} {best.get('metric')} at v{version}, checkpoint of step {step}"


def recent_ends(actors: Iterable[Mapping[str, Json]]) -> dict[str, int]:
    """Return the recent episodes of all actors by end."""
    found: Counter[str] = Counter()
    for values in actors:
        ends = values.get("recent_ends")
        for end, episodes in ends.items() if isinstance(ends, Mapping) else ():
            if isinstance(episodes, int):
                found[str(end)] += episodes
    return dict(found)


def ends_text(ends: Mapping[str, int]) -> str:
    """Return the fraction of episodes that something around the policy broke, and by which ends. Before an
    episode has ended it is `UNKNOWN`."""
    fraction = failed_fraction(ends)
    if fraction is None:
        return UNKNOWN
    failed = sorted((-number, end) for end, number in ends.items() if failed_by(end))
    why = ", ".join(f"{-number} {end}" for number, end in failed)
    return f"{share(fraction)} failed of {count(sum(ends.values()))} recent" + (f": {why}" if why else "")


def further_policies(actors: Iterable[Mapping[str, Json]]) -> dict[str, dict[str, Json]]:
    """Return the state of each further policy by name: what the actor that heard most of it knows.
    `oldest_in_use` is the oldest version that any actor's engines have."""
    found: dict[str, dict[str, Json]] = {}
    for values in actors:
        policies = values.get("policies")
        for name, told in policies.items() if isinstance(policies, Mapping) else ():
            if not isinstance(told, dict):
                continue
            known = found.get(name, told)
            newest = max(known, told, key=lambda one: integer(one, "published"))
            oldest = min(integer(known, "oldest_in_use"), integer(told, "oldest_in_use"))
            found[name] = {**newest, "oldest_in_use": oldest}
    return found


def policy_text(state: Mapping[str, Json]) -> str:
    """Return the stage, step and versions of one further policy in words."""
    published, used = integer(state, "published"), integer(state, "oldest_in_use")
    if published < 0:
        return "not published yet"
    return f"{state.get('stage')}, step {integer(state, 'step')}: v{published} published, v{used} in use"


def holders_text(actors: Sequence[Status]) -> str:
    """Return what these actors do with the groups that they have, with its speed; empty without actors. What
    has the most rollouts comes first."""
    if not actors:
        return ""
    requests = sum(integer(one.values, "running") + integer(one.values, "waiting") for one in actors)
    rewards = sum(integer(one.values, "rewards_running") for one in actors)
    others = sum(integer(one.values, "rollouts_running") for one in actors) - requests - rewards
    rollouts = "rollout is" if others == 1 else "rollouts are"
    found = [
        (rewards, _rewards(actors, rewards)),
        (requests, _engines(actors)),
        (others, f"{others} {rollouts} in environments"),
    ]
    held = [text for size, text in sorted(found, reverse=True) if size > 0]
    return "; ".join([*held, *_not_serving(actors)]) or NOTHING_HELD


def _not_serving(actors: Sequence[Status]) -> Iterator[str]:
    engines = (engine for one in actors for engine in engines_of(one.values).values())
    states = Counter(str(engine.get("state")) for engine in engines)
    if states and not states["serving"]:
        yield f"no engine serves: {_listed(states)}"
    if without := Counter(one.doing for one in actors if one.wait in ("engine", "policy") and not one.values):
        yield f"actors without an engine: {_listed(without)}"


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {what}" for what, number in numbers.items())


def engines_of(values: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    found = values.get("engines")
    return {name: e for name, e in found.items() if isinstance(e, dict)} if isinstance(found, dict) else {}


def engine_texts(actors: Sequence[Mapping[str, Json]]) -> list[tuple[str, str]]:
    """Return what engines tell of their caches and drafts, as means over actors: value and label of each."""
    found = []
    for name, label in ENGINE_FIGURES.items():
        told = [value for one in actors if isfinite(value := number(one, name))]
        if told:
            mean = sum(told) / len(told)
            found.append((f"{mean:.0%}" if name.endswith("_fraction") else f"{mean:.2f}", label))
    return found


def _engines(actors: Sequence[Status]) -> str:
    running = sum(integer(one.values, "running") for one in actors)
    queued = sum(integer(one.values, "waiting") for one in actors)
    rates = [number(one.values, "generated_tokens_per_s") for one in actors]
    rate = sum(one for one in rates if one == one)
    more = f" and {queued} more queue" if queued else ""
    if not running:
        return f"{queued} {'request waits' if queued == 1 else 'requests wait'} for an engine"
    run, each = "request" if running == 1 else "requests", per_time(rate / running)
    return f"engines run {running} {run}{more}, at {per_time(rate)} tokens/s ({each} each)"


def _rewards(actors: Sequence[Status], running: int) -> str:
    longest_s = max((number(one.values, "rewards_longest_s") for one in actors), default=0.0)
    took = [number(one.values, "reward_s") for one in actors]
    known = [seconds for seconds in took if seconds == seconds]
    usual = f"; before, one took {duration(sum(known) / len(known))}" if known else ""
    run = "reward runs" if running == 1 else "rewards run"
    return f"{running} {run}, the longest for {duration(longest_s)}{usual}"
