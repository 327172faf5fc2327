"""Engines of the policies beside the one that rolls out."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from actors.engines.base import Engine


@dataclass(frozen=True, kw_only=True)
class OtherEngines:
    """Who answers for the other policies that a call may name, and which agents they are."""

    opponents: Mapping[str, Engine] = field(default_factory=dict)
    """Engines of frozen policies by name; a call for one is not trained."""
    further: Mapping[str, Engine] = field(default_factory=dict)
    """Engines of the policies that are trained beside this one, by name."""
    agents: Mapping[str, str] = field(default_factory=dict)
    """Names of further policies by agent, for calls that name no policy."""
    unscaled: Set[str] = frozenset()
    """Policies, by name, whose engines tell log-probs at temperature 1 alone, perhaps the own one too."""

    @property
    def names(self) -> Set[str]:
        return self.opponents.keys() | self.further.keys()


ALONE = OtherEngines()
"""Nobody beside the policy itself."""
