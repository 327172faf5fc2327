"""How recent episodes of a run ended, for every screen."""

from collections import Counter
from collections.abc import Iterable, Mapping

from bus.actor_counters import failed_by, failed_fraction
from bus.codec import Json
from launch.watch.units import UNKNOWN, count, share


def recent_ends(actors: Iterable[Mapping[str, Json]]) -> dict[str, int]:
    """Return the recent episodes of all actors by end.

    Args:
        actors: the values of each actor's status.
    """
    found: Counter[str] = Counter()
    for values in actors:
        ends = values.get("recent_ends")
        for end, number in ends.items() if isinstance(ends, Mapping) else ():
            if isinstance(number, int):
                found[str(end)] += number
    return dict(found)


def ends_text(ends: Mapping[str, int]) -> str:
    """Return the fraction of episodes that something around the policy broke, and by which ends.

    Before an episode has ended it is `UNKNOWN`."""
    fraction = failed_fraction(ends)
    if fraction is None:
        return UNKNOWN
    failed = sorted((-number, end) for end, number in ends.items() if failed_by(end))
    why = ", ".join(f"{-number} {end}" for number, end in failed)
    return f"{share(fraction)} failed of {count(sum(ends.values()))} recent" + (f": {why}" if why else "")
