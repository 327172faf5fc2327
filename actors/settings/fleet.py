"""Settings of the engines of one actor process. Loads without torch."""

from typing import Self

from pydantic import Field, model_validator

from bus.config import Config


class FleetConfig(Config):
    """How many engines there are, which one takes a request, and what happens to one that fails."""

    engines: int = Field(1, ge=1)
    """Number of engines that this process runs."""
    requests_per_engine: int = Field(256, ge=1)
    """Most requests that one engine has at once; further ones wait in the fleet, the oldest goes first."""
    refill: float = Field(1 / 16, ge=0, lt=1)
    """Share of a full engine's places that must be free before it takes requests again, several together. An
    engine stops decoding for each batch of prompts, however small. 0 fills each place at once."""
    soft_kv_share: float = Field(0.8, gt=0, le=1)
    """Share of the engines' KV tokens that the contexts of episodes under way are expected to fill. No lease
    is taken beyond it, whatever `groups_at_once` allows. It holds for engines that tell how full they are."""
    hard_kv_share: float = Field(0.9, gt=0, le=1)
    """Share of an engine's KV tokens from which it gets no further request while it has others: requests wait
    in the fleet, the oldest goes first, and no cached context is computed twice."""
    affinity_slack: int = Field(16, ge=0)
    """Requests by which the engine that has a request's beginning in its cache may exceed the least busy one
    and still get the request. With 0 only the load counts."""
    updated_at_once: float = Field(0.5, gt=0, le=1)
    """Largest share of the serving engines that load new weights at the same time; one always may."""
    attempts: int = Field(5, ge=1)
    """Failures of a request, or of its engine, after which the request is given up. An engine's failure is
    its fault only if it was alone there, so each further attempt has fewer requests beside it."""
    errors_in_a_row: int = Field(3, ge=1)
    """Failed requests in a row after which an engine counts as failed though it reports that it is
    healthy."""
    request_timeout_s: float = Field(1800.0, gt=0)
    """Time after which a generation is interrupted; it goes on from its tokens at an engine with a free
    place."""
    start_timeout_s: float = Field(1200.0, gt=0)
    """Longest time that an engine may take to start; it exceeds the engine's own limit, whose error says
    why."""
    update_timeout_s: float = Field(1300.0, gt=0)
    """Longest time that an engine may take to load weights; it exceeds the engine's own limits, whose errors
    say why."""
    health_period_s: float = Field(5.0, gt=0)
    """Time from one check of an engine's health to the next."""
    health_timeout_s: float = Field(60.0, gt=0)
    """Longest answer time of a check; an engine that exceeds it counts as failed."""
    drain_timeout_s: float = Field(10.0, gt=0)
    """Longest time that an engine taken out of service may take to hand out the tokens that it has
    sampled."""
    close_timeout_s: float = Field(60.0, gt=0)
    """Longest time that an engine may take to end."""
    restarts: int = Field(5, ge=0)
    """Most times that an engine is built again within `restart_window_s`; one more failure gives it up."""
    restart_window_s: float = Field(600.0, gt=0)
    """Age at which an engine's failures no longer count."""
    backoff_s: float = Field(1.0, gt=0)
    """Pause before an engine is built again; it doubles with each failure in the window."""
    backoff_max_s: float = Field(60.0, gt=0)
    """Upper bound on that pause."""

    @model_validator(mode="after")
    def _leases_end_before_requests(self) -> Self:
        if self.soft_kv_share > self.hard_kv_share:
            raise ValueError(
                f"soft_kv_share={self.soft_kv_share:g} is above hard_kv_share={self.hard_kv_share:g}: "
                "lower it, or episodes are begun whose requests must wait"
            )
        return self

    @model_validator(mode="after")
    def _pauses_grow(self) -> Self:
        if self.backoff_max_s < self.backoff_s:
            raise ValueError(
                f"backoff_max_s={self.backoff_max_s:g} is below backoff_s={self.backoff_s:g}: raise it"
            )
        return self

    def refill_of(self, places: int) -> int:
        """Return how many of so many places are filled together."""
        return max(1, int(self.refill * places))

    def requests_after(self, failures: int) -> int:
        """Return how many requests an engine may have at once beside one under which engines have failed.
        After one failure there are as many as ever, since engines also end of other causes. Then there are
        fewer each time, and the request is alone for the last of its `attempts`. The count includes it."""
        if failures == 0:
            return self.requests_per_engine
        left = (self.attempts - 1 - failures) / max(1, self.attempts - 2)
        return max(1, int(self.requests_per_engine ** min(1.0, max(0.0, left))))

    def backoff_after_s(self, failures: int) -> float:
        """Return the pause after so many failures in the window, at least 1."""
        return float(min(self.backoff_s * 2 ** (failures - 1), self.backoff_max_s))
