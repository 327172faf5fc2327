"""What an actor tells of the engines of one policy: their state for screens, and counters for the record."""

import time
from collections import deque
from collections.abc import Sequence

from actors.engines.base import WorkCounts
from actors.engines.fleet.fleet import Fleet
from actors.weights.follow import PolicyFollower
from bus.actor_counters import MEANS
from bus.codec import Json

WINDOW_S = 1.0
"""Shortest time over which a rate is taken."""
WINDOWS = 60
"""Such times over which shares are taken: answers come in bursts."""


class EngineReport:
    """Reads the engines and what brings them their weights."""

    def __init__(self, engine: Fleet, follower: PolicyFollower) -> None:
        self._engine = engine
        self._follower = follower
        self._tokens_per_s = 0.0
        self._seen = (time.monotonic(), 0)
        """When tokens were counted last, and how many there were."""
        self._work: deque[WorkCounts] = deque([WorkCounts()], WINDOWS)
        """What the engines had counted at the ends of the last windows, the oldest first."""

    @property
    def step(self) -> int:
        """Return the version of the engines' weights, 0 before the first."""
        return max(0, self._engine.policy_version)

    def state(self) -> dict[str, Json]:
        engine = self._engine
        return {
            "running": engine.running,
            "waiting": engine.waiting,
            "tokens_generated": engine.tokens_generated,
            "generated_tokens_per_s": self._rate(),
            "policy_version": engine.policy_version,
            "pause_s": self._follower.pause_s,
            "engines": engine.engines,
            **self._shares(),
        }

    def counters(self, further_means: Sequence[str] = ()) -> dict[str, Json]:
        """Return what the engines have done since their start, and how full they are now. `MEANS` names what
        is no sum over actors, `further_means` too."""
        engine, work = self._engine, self._engine.work_counts
        means: dict[str, Json] = {f"engine/{name}": value for name, value in self._shares().items()}
        return {
            "engine/count": len(engine.engines),
            "engine/busy_s": engine.busy_s,
            "engine/request_s": engine.request_s,
            "engine/tokens": engine.tokens_generated,
            "engine/tokens_per_s": self._rate(),
            "engine/running": engine.running,
            "engine/queued": engine.waiting,
            "engine/prompt_tokens": work.prompt_tokens,
            "engine/cached_tokens": work.cached_tokens,
            "engine/pause_s": self._follower.pause_s,
            "engine/receive_s": self._follower.receive_s,
            **means,
            MEANS: [*further_means, *means],
        }

    def _rate(self) -> float:
        (before, tokens), now = self._seen, time.monotonic()
        if now - before > WINDOW_S:
            generated = self._engine.tokens_generated
            self._tokens_per_s = (generated - tokens) / (now - before)
            self._seen = (now, generated)
            self._work.append(self._engine.work_counts)
        return self._tokens_per_s

    def _shares(self) -> dict[str, Json]:
        """Return shares that the engines tell: of the cache that is full, of prompts found there over the
        last minute, and the tokens that a pass of the model accepts of drafts."""
        kv, found = self._engine.kv_tokens, self._engine.work_counts.since(self._work[0])
        shares: dict[str, Json] = {}
        if kv is not None:
            shares["kv_used_fraction"] = kv.used / kv.capacity
        if found.prompt_tokens:
            shares["prefix_hit_fraction"] = found.cached_tokens / found.prompt_tokens
        if found.draft_passes:
            shares["accepted_tokens_per_pass"] = found.drafted_tokens / found.draft_passes
        return shares
