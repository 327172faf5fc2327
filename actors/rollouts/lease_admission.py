"""How many leases an actor takes: by the free KV tokens of its engines, and by who wants them."""

from collections.abc import Callable

from actors.engines.base import KvTokens
from actors.environments.base import Environment, RunsOnDemand
from actors.policy.context_tokens import ContextTokens

Look = Callable[[], KvTokens | None]
WAIT_S = 0.5
"""Longest time until the engines are looked at again: contexts also grow while no episode begins or ends."""
LOOK_S = 1.0
"""Seconds after which an actor whose leases nobody wants notices that it is to end."""


class LeaseAdmission:
    """Takes leases until the contexts of their episodes are likely to fill a share of the engines' caches.
    More of them would not run at once: their contexts would be thrown away between turns, and computed again.
    Fewer would leave the engines idle."""

    def __init__(self, contexts: ContextTokens, look: Look, *, soft_share: float) -> None:
        self._contexts = contexts
        self._look = look
        self._soft_share = soft_share

    def room(self, most: int, *, not_begun: int) -> int:
        """Return how many further leases may be taken, at most `most`."""
        kv = self._look()
        if kv is None:
            return most
        if not (self._contexts.leases or not_begun):
            return min(1, most)
        expected, of_a_lease = self._contexts.expected(shares_prefixes=kv.shares_prefixes)
        if of_a_lease is None:  # the first lease shows how long contexts are
            return 0
        free = self._soft_share * kv.capacity - max(expected, kv.used) - not_begun * of_a_lease
        return max(0, min(most, int(free // max(1.0, of_a_lease))))

    @property
    def metrics(self) -> dict[str, int]:
        """Return how full the engines are, and what the episodes under way are expected to need."""
        kv = self._look()
        if kv is None:
            return {}
        expected, _ = self._contexts.expected(shares_prefixes=kv.shares_prefixes)
        return {
            "engine/kv_tokens_used": kv.used,
            "engine/kv_tokens_capacity": kv.capacity,
            "rollout/context_tokens_expected": expected,
        }


class LeaseRoom:
    """Says how many leases a worker takes, besides those that it has."""

    def __init__(
        self, environment: Environment, contexts: ContextTokens, admission: LeaseAdmission | None = None
    ) -> None:
        self.admission = admission
        """Bounds leases by the engines' free KV tokens; without it only their number does."""
        self.not_begun: set[int] = set()
        """Leases that were taken and whose rollouts have not begun."""
        self._on_demand = environment if isinstance(environment, RunsOnDemand) else None
        self._contexts = contexts

    async def within(self, most: int) -> int:
        """Return how many to take, at most `most`, and wait a moment where that is 0."""
        found = await self._room(most)
        if not found and most:  # whoever asks again at once would let nothing else run
            await self._contexts.changed_within(WAIT_S)
            found = await self._room(most)
        return found

    async def _room(self, most: int) -> int:
        if self._on_demand is not None:
            most = await self._wanted(self._on_demand, most)
        if self.admission is None or not most:
            return most
        return self.admission.room(most, not_begun=len(self.not_begun))

    async def _wanted(self, environment: RunsOnDemand, most: int) -> int:
        """Return how many leases are wanted. The first is taken alone: it shows how many rollouts one has."""
        samples = self._contexts.samples
        wanted = await environment.leases_wanted(samples or 1, LOOK_S)
        return max(0, min(most, wanted if samples else 1, wanted) - len(self.not_begun))
