"""Policies that a run trains beside its own: the engines that answer for them, and which agents they are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.engines.base import Engine
from bus.policy_names import DEFAULT_POLICY

_NUMBERED = re.compile(r"(.+)-\d+")


@dataclass(frozen=True)
class FurtherEngines:
    """Who answers for these policies, and which agents they are."""

    engines: Mapping[str, Engine] = field(default_factory=dict)
    """By the name of the policy."""
    agents: Mapping[str, str] = field(default_factory=dict)
    """Names of policies by agent, for calls that name no policy."""


def policy_of(agent: str, agents: Mapping[str, str]) -> str:
    """Return the policy that an agent is: `rewriter-2` is that of the name `rewriter-2`, or of `rewriter`.

    Args:
        agent: its name in the environment.
        agents: names of policies by agent; the others are the run's own policy."""
    if agent in agents:
        return agents[agent]
    role = _NUMBERED.fullmatch(agent)
    return agents.get(role[1], DEFAULT_POLICY) if role else DEFAULT_POLICY
