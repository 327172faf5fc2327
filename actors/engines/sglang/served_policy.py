"""What each policy has at an SGLang server, which may serve several."""

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from actors.engines.sglang.adapters import Adapters
from actors.engines.sglang.loaded_adapter import LoadedAdapter


@dataclass(eq=False)
class ServedPolicy:
    """A policy with versions of its own. Several on one server have its frozen weights in common."""

    adapters: Adapters | None = None
    version: int = -1
    """Version that new requests have, -1 before the first."""
    loads: int = 0
    tokens_generated: int = 0
    """Number of tokens sampled for the policy since the start."""
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while requests are let through, and for good once the server has failed."""
    mark: str = field(default_factory=lambda: secrets.token_hex(4))
    """Tells apart versions of the same number: a server that others had before this engine, as an
    attached one, still has what it computed for them."""

    @property
    def adapter(self) -> LoadedAdapter | None:
        """Return what new requests have; None for the weights alone."""
        return self.adapters.newest if self.adapters else None

    @property
    def salt(self) -> str:
        """Return what keeps prefixes and images that other weights computed from its requests."""
        version = self.adapter.policy_version if self.adapter else self.version
        return f"{self.mark}.{version}.{self.loads}"

    def taken(self, version: int) -> None:
        self.version = version
        self.loads += 1

    def open(self) -> None:
        """Let requests through, if there are weights to serve them with."""
        bare = self.adapters is not None and self.adapters.newest is None
        if self.version >= 0 and not bare:
            self.serving.set()

    def leave(self) -> None:
        """Let no request through until it has a version again."""
        self.serving.clear()
        self.version = -1


class ServedPolicies:
    """All policies of one server: the engine's own, and those that it serves beside that."""

    def __init__(self) -> None:
        self.own = ServedPolicy()
        self._further: dict[str, ServedPolicy] = {}

    def __iter__(self) -> Iterator[ServedPolicy]:
        return iter((self.own, *self._further.values()))

    def named(self, name: str) -> ServedPolicy | None:
        """Return a further policy; None before it was added."""
        return self._further.get(name)

    def add(self, name: str, adapters: Adapters) -> ServedPolicy:
        return self._further.setdefault(name, ServedPolicy(adapters))

    def shut(self) -> None:
        for policy in self:
            policy.serving.clear()

    def open(self) -> None:
        """Let requests through for those policies that have weights."""
        for policy in self:
            policy.open()

    def end(self) -> None:
        for policy in self:
            policy.serving.set()
