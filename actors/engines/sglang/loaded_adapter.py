"""An adapter in an SGLang server, and what its answers say of the weights under it."""

from dataclasses import dataclass, replace

import numpy as np

from actors.engines.base import Generation
from actors.engines.sglang.client.weight_labels import OtherWeightsError


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One version of the policy in a server."""

    name: str
    policy_version: int
    base_version: int
    """Version of the frozen weights under it, as the server names them."""

    def drew(self, generation: Generation) -> Generation:
        """Return what a request for this adapter was answered, whose tokens are all of its version. Raises
        `OtherWeightsError` where the server drew some of them with other weights under it."""
        other = np.flatnonzero(generation.policy_versions != self.base_version)
        if len(other):
            raise OtherWeightsError(
                f"token {other[0]} of {len(generation.token_ids)} was drawn with weights of version "
                f"{generation.policy_versions[other[0]]}, and those of adapter {self.name} are of version "
                f"{self.base_version}"
            )
        versions = np.full(len(generation.token_ids), self.policy_version, np.int32)
        return replace(generation, policy_versions=versions)
