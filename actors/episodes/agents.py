"""Names of agents, and which trained policy each of them is. Loads without numpy and torch."""

import re
from collections.abc import Mapping

from bus.policy_names import DEFAULT_POLICY

DEFAULT_AGENT = "solver"
_NUMBERED = re.compile(r"(.+)-\d+")


def policy_of(agent: str, agents: Mapping[str, str]) -> str:
    """Return the policy that an agent is: `rewriter-2` is that of the name `rewriter-2`, or of `rewriter`."""
    if agent in agents:
        return agents[agent]
    role = _NUMBERED.fullmatch(agent)
    return agents.get(role[1], DEFAULT_POLICY) if role else DEFAULT_POLICY
