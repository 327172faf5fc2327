"""The weights that the engines of a process should have, kept on the host for those that come late."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HostWeights:
    """One policy version in whole, and what is new in it.

    All engines share these tensors; nobody writes to them. A version costs what changed since the last."""

    serial: int = 0
    """Counts the updates: versions may come again when a learner resumes. 0 is before the first."""
    policy_version: int = -1
    full: Mapping[str, "torch.Tensor"] = field(default_factory=dict)
    """All tensors, by Hugging Face name."""
    changed: Mapping[str, "torch.Tensor"] = field(default_factory=dict)
    """Those that differ from the update before."""

    def followed_by(self, state: Mapping[str, "torch.Tensor"], policy_version: int) -> "HostWeights":
        """The next update; `state` holds all tensors, or those that changed since this one."""
        full = {**self.full, **state}
        return HostWeights(self.serial + 1, policy_version, full=full, changed=state)

    def since(self, serial: int) -> Mapping[str, "torch.Tensor"]:
        """What an engine that has the update `serial` lacks."""
        return self.changed if serial == self.serial - 1 and serial > 0 else self.full
