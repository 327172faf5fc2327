"""What holds the groups that are rolled out: engines, rewards or environments, and how fast those are."""

from collections import Counter
from collections.abc import Mapping, Sequence

from bus.codec import Json
from bus.messages import Status
from launch.watch.units import count, duration
from storage.metrics.records import integer, number


def holders_text(actors: Sequence[Status]) -> str:
    """Return what these actors do with the groups that they have, with its speed; empty without actors.

    What has the most rollouts comes first."""
    if not actors:
        return ""
    requests = sum(integer(one.values, "running") + integer(one.values, "waiting") for one in actors)
    rewards = sum(integer(one.values, "rewards_running") for one in actors)
    found = [(rewards, _rewards(actors, rewards)), (requests, _engines(actors))]
    held = [text for size, text in sorted(found, reverse=True) if size]
    if held:
        return "; ".join(held)
    engines = (engine for one in actors for engine in engines_of(one.values).values())
    states = Counter(str(engine.get("state")) for engine in engines)
    if states and not states["serving"]:
        return f"no engine serves: {', '.join(f'{number} {state}' for state, number in states.items())}"
    if all("rewards_running" in one.values for one in actors):
        return "no engine has a request and no reward runs: environments hold them, or they are being stored"
    return "no engine has a request, so environments or rewards hold them"


def engines_of(values: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """Return what an actor's status tells of each of its engines, by name."""
    found = values.get("engines")
    return {name: e for name, e in found.items() if isinstance(e, dict)} if isinstance(found, dict) else {}


def _engines(actors: Sequence[Status]) -> str:
    running = sum(integer(one.values, "running") for one in actors)
    queued = sum(integer(one.values, "waiting") for one in actors)
    rates = [number(one.values, "generated_tokens_per_s") for one in actors]
    rate = sum(one for one in rates if one == one)
    more = f" and {queued} more queue" if queued else ""
    each = f" ({_rate(rate / running)} each)" if running else ""
    run = "request" if running == 1 else "requests"
    return f"engines run {running} {run}{more}, at {_rate(rate)} tokens/s{each}"


def _rewards(actors: Sequence[Status], running: int) -> str:
    longest_s = max((number(one.values, "rewards_longest_s") for one in actors), default=0.0)
    took = [number(one.values, "reward_s") for one in actors]
    known = [seconds for seconds in took if seconds == seconds]
    usual = f"; before, one took {duration(sum(known) / len(known))}" if known else ""
    run = "reward runs" if running == 1 else "rewards run"
    return f"{running} {run}, the longest for {duration(longest_s)}{usual}"


def _rate(per_s: float) -> str:
    return f"{per_s:.1f}" if per_s < 10 else count(per_s)
