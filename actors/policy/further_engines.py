"""Engines of the policies that a run trains beside its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.engines.base import Engine


@dataclass(frozen=True)
class FurtherEngines:
    """Who answers for these policies, and which agents they are."""

    engines: Mapping[str, Engine] = field(default_factory=dict)
    """By the name of the policy."""
    agents: Mapping[str, str] = field(default_factory=dict)
    """Names of policies by agent, for calls that name no policy."""
