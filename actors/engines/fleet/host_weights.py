"""The weights that the engines of a process should have, kept on the host for those that come late."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.engines.announced_version import Published
from actors.engines.base import Engine, TakesPublished

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
    """Tensors that differ from the update before."""
    published: Published | None = None
    """An announcement in place of the tensors: each engine has the learner send them."""

    def followed_by(self, state: Mapping[str, "torch.Tensor"], policy_version: int) -> "HostWeights":
        """Return the next update; `state` holds all tensors, or those that changed since this one."""
        full = {**self.full, **state}
        return HostWeights(self.serial + 1, policy_version, full=full, changed=state)

    def followed_by_published(self, published: Published) -> "HostWeights":
        """Return the next update, of which only the announcement is here."""
        return HostWeights(self.serial + 1, published.policy_version, published=published)

    async def load_into(self, engine: Engine, serial: int) -> float:
        """Update an engine that has the update `serial`; return the seconds generation stood still."""
        if self.published is None:
            return await engine.load_weights(self.since(serial), self.policy_version)
        if not isinstance(engine, TakesPublished):
            raise TypeError(f"{type(engine).__name__} takes weights from its host only")
        return await engine.load_published(self.published)

    def are_in(self, engine: Engine) -> bool:
        """Return whether the engine says so; what the learner sent it may be of a later version."""
        later = self.published is not None and engine.policy_version > self.policy_version
        return later or engine.policy_version == self.policy_version

    def since(self, serial: int) -> Mapping[str, "torch.Tensor"]:
        """Return what an engine that has the update `serial` lacks."""
        return self.changed if serial == self.serial - 1 and serial > 0 else self.full
