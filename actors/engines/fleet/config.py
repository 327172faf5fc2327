"""Settings of the engines of one actor process. Loads without torch."""

from typing import Self

from pydantic import Field, model_validator

from bus.config import Config


class FleetConfig(Config):
    """How many engines there are, which one takes a request, and what becomes of one that fails."""

    engines: int = Field(1, ge=1)
    """Engines that this process runs."""

    requests_per_engine: int = Field(256, ge=1)
    """Requests that one engine has at once; further ones wait in the fleet, the oldest goes first."""

    refill: float = Field(1 / 16, ge=0, lt=1)
    """An engine that had no place left gives the next ones away together, as soon as this share is free: it
    stops decoding for each batch of prompts, be it one. 0 gives each away at once."""

    affinity_slack: int = Field(16, ge=0)
    """A request goes where its beginning is cached, unless that engine has this many requests more than
    the least busy one. 0 looks at the load only."""

    updated_at_once: float = Field(0.5, gt=0, le=1)
    """Share of the serving engines that take new weights at the same time; one may always."""

    attempts: int = Field(5, ge=1)
    """Times that a request may fail, or its engine under it, before it counts as the request's fault: an
    engine's failure only if the request was alone there. It is, in the end: with each failure after its first
    it is among fewer others."""

    errors_in_a_row: int = Field(3, ge=1)
    """Requests that fail one after the other at an engine which says that it is well, before it is taken for
    failed all the same."""

    request_timeout_s: float = Field(1800.0, gt=0)
    """After this a generation is interrupted, and goes on from its tokens where there is room."""

    start_timeout_s: float = Field(1200.0, gt=0)
    """Longest that an engine may take to build and start; more than its own limit, which says why."""

    update_timeout_s: float = Field(1300.0, gt=0)
    """Longest that an engine may take to load weights; more than its own limits, which say why."""

    health_period_s: float = Field(5.0, gt=0)
    """Between two looks at an engine's health."""

    health_timeout_s: float = Field(60.0, gt=0)
    """An engine that does not answer for so long has failed."""

    drain_timeout_s: float = Field(10.0, gt=0)
    """How long an engine that is taken out of service may take to hand out the tokens it has sampled."""

    close_timeout_s: float = Field(60.0, gt=0)
    """Longest that an engine may take to end."""

    restarts: int = Field(5, ge=0)
    """Failures within `restart_window_s` after which an engine is built again; the next one gives it up."""

    restart_window_s: float = Field(600.0, gt=0)
    """Older failures are forgotten."""

    backoff_s: float = Field(1.0, gt=0)
    """Pause before an engine is built again; doubles with each failure in the window."""

    backoff_max_s: float = Field(60.0, gt=0)
    """Longest such pause."""

    @model_validator(mode="after")
    def _pauses_grow(self) -> Self:
        if self.backoff_max_s < self.backoff_s:
            raise ValueError(
                f"backoff_max_s={self.backoff_max_s:g} is below backoff_s={self.backoff_s:g}: raise it"
            )
        return self

    def refill_of(self, places: int) -> int:
        """How many of so many places are given away together."""
        return max(1, int(self.refill * places))

    def company_after(self, failures: int) -> int:
        """Requests that an engine may have at once, one among them under which so many engines have failed.

        After one failure as many as ever, for engines end of other causes, too. Then fewer and fewer, so that
        it is alone when the next failure is to be the last of its `attempts`."""
        if failures == 0:
            return self.requests_per_engine
        left = (self.attempts - 1 - failures) / max(1, self.attempts - 2)
        return max(1, int(self.requests_per_engine ** min(1.0, max(0.0, left))))

    def backoff_after_s(self, failures: int) -> float:
        """Pause after so many failures in the window, >= 1."""
        return float(min(self.backoff_s * 2 ** (failures - 1), self.backoff_max_s))
