"""What an actor tells of the engines of one policy: their state for screens, and counters for the record."""

import time

from actors.engines.fleet.fleet import Fleet
from actors.weights.follow import PolicyFollower
from bus.codec import Json

WINDOW_S = 1.0
"""Shortest time over which a rate is taken."""


class EngineReport:
    """Reads the engines and what brings them their weights."""

    def __init__(self, engine: Fleet, follower: PolicyFollower) -> None:
        self._engine = engine
        self._follower = follower
        self._seen = (time.monotonic(), 0)
        """When tokens were counted last, and how many there were."""

    @property
    def step(self) -> int:
        """Return the version of the engines' weights, 0 before the first."""
        return max(0, self._engine.policy_version)

    def state(self) -> dict[str, Json]:
        """Return what the engines do now."""
        engine, (before, tokens), now = self._engine, self._seen, time.monotonic()
        rate = (engine.tokens_generated - tokens) / max(now - before, 1e-9)
        if now - before > WINDOW_S:
            self._seen = (now, engine.tokens_generated)
        return {
            "running": engine.running,
            "waiting": engine.waiting,
            "tokens_generated": engine.tokens_generated,
            "generated_tokens_per_s": rate,
            "policy_version": engine.policy_version,
            "pause_s": self._follower.pause_s,
            "engines": engine.engines,
        }

    def counters(self) -> dict[str, Json]:
        """Return what the engines have done since their start."""
        engine = self._engine
        return {
            "engine/count": len(engine.engines),
            "engine/busy_s": engine.busy_s,
            "engine/request_s": engine.request_s,
            "engine/tokens": engine.tokens_generated,
            "engine/pause_s": self._follower.pause_s,
            "engine/receive_s": self._follower.receive_s,
        }
