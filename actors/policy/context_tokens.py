"""How long the contexts of the episodes under way are, and how long they are likely to become."""

import asyncio
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

from bus.waiting import set_within

RECENT = 256
"""Ended episodes whose growth says what others will have."""


@dataclass(slots=True)
class _Episode:
    lease_id: int
    prompt: int | None = None
    """Tokens of its first request."""
    limit: int = 0
    """Tokens that its first answer may add."""
    agents: dict[str, int] = field(default_factory=dict)
    """Tokens of each agent's newest context."""

    @property
    def grown(self) -> int:
        return max(0, sum(self.agents.values()) - (self.prompt or 0))


class ContextTokens:
    """Counts tokens of contexts, also of those whose agent does not ask now: their cache is wanted again."""

    def __init__(self) -> None:
        self._leases: dict[int, dict[str, _Episode]] = {}
        self._episodes: dict[str, _Episode] = {}
        self._grown: deque[int] = deque(maxlen=RECENT)
        self._samples = 0
        self._changed = asyncio.Event()

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def samples(self) -> int:
        """Return the number of rollouts of the newest lease; 0 before the first."""
        return self._samples

    def begin(self, lease_id: int, rollouts: list[str]) -> None:
        self._leases[lease_id] = {name: _Episode(lease_id) for name in rollouts}
        self._episodes.update(self._leases[lease_id])
        self._samples = max(1, len(rollouts))
        self._changed.set()

    def note(self, rollout: str, agent: str, tokens: int, limit: int = 0) -> None:
        """Note the length of an agent's context, in tokens, and how many its answer may add."""
        episode = self._episodes.get(rollout)
        if episode is None:
            return  # a held-out prompt's
        if episode.prompt is None:
            episode.prompt, episode.limit = tokens, limit
            self._changed.set()
        episode.agents[agent] = tokens

    def ended(self, rollout: str) -> None:
        episode = self._episodes.pop(rollout, None)
        if episode is None:
            return
        if episode.prompt is not None:
            self._grown.append(episode.grown)
        siblings = self._leases.get(episode.lease_id, {})
        siblings.pop(rollout, None)
        if not siblings:
            self._leases.pop(episode.lease_id, None)
        self._changed.set()

    def end(self, lease_id: int) -> None:
        for rollout in list(self._leases.get(lease_id, ())):
            self.ended(rollout)
        self._leases.pop(lease_id, None)

    async def changed_within(self, timeout_s: float) -> None:
        """Return when a lease or an episode began or ended, or after the given time."""
        self._changed.clear()
        await set_within(self._changed, timeout_s)

    def expected(self, *, shares_prefixes: bool) -> tuple[int, float | None]:
        """Return the tokens that the episodes under way are likely to need, and those of a further lease. The
        latter is None as long as no request of the first lease has come. An episode is expected to grow as
        those of the recent ones did that grew beyond what it has; one beyond all of them, by an answer."""
        asked = [episode for episode in self._episodes.values() if episode.prompt is not None]
        if not asked:
            return 0, None
        prompt = sum(episode.prompt or 0 for episode in asked) / len(asked)
        # Episodes under way count too: the first to end are the short ones.
        growth = _Growth([*self._grown, *(episode.grown + episode.limit for episode in asked)])
        total = 0.0
        for episodes in self._leases.values():
            prompts = [prompt if e.prompt is None else e.prompt for e in episodes.values()]
            total += max(prompts, default=0) if shares_prefixes else sum(prompts)
            total += sum(growth.beyond(episode.grown) for episode in episodes.values())
        held = prompt if shares_prefixes else prompt * self._samples
        return int(total), held + growth.beyond(0) * self._samples


class _Growth:
    """How far contexts grow that have grown so far already."""

    def __init__(self, grown: list[int]) -> None:
        self._grown = sorted(grown)
        self._sums = [0, *accumulate(reversed(self._grown))]
        """Sums of the largest 0, 1, 2 ... of them."""

    def beyond(self, tokens: int) -> float:
        """Return the mean of lengths above `tokens`, and `tokens` where there is none."""
        above = len(self._grown) - bisect_right(self._grown, tokens)
        return self._sums[above] / above if above else float(tokens)
