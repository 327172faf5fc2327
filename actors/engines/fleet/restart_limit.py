"""How often a failed engine of a fleet is built again, and after which pauses."""

from actors.settings.fleet import FleetConfig


class RestartLimit:
    """Counts the failures of the engines of one place within `restart_window_s`."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._failures_s: list[float] = []

    @property
    def failures(self) -> int:
        """Return the number of failures that counted when the latest one was noted."""
        return len(self._failures_s)

    def pause_after_failure_s(self, now_s: float) -> float | None:
        """Note a failure and return the pause before the next engine, in seconds; None when none may follow.

        Args:
            now_s: the time of the failure on a monotonic clock."""
        self._failures_s = [at for at in self._failures_s if now_s - at < self._config.restart_window_s]
        self._failures_s.append(now_s)
        if len(self._failures_s) > self._config.restarts:
            return None
        return self._config.backoff_after_s(len(self._failures_s))
