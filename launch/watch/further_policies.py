"""How far the further policies of a run are, for every screen, as the run's actors tell it."""

from collections.abc import Iterable, Mapping

from bus.codec import Json
from storage.metrics.records import integer


def further_policies(actors: Iterable[Mapping[str, Json]]) -> dict[str, dict[str, Json]]:
    """Return the state of each further policy by name: what the actor that heard most of it knows.

    `oldest_in_use` is the oldest version that any actor's engines have.

    Args:
        actors: the values of each actor's status.
    """
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
