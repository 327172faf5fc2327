"""Keeps a message that recurs for hundreds of leases at once to one line of the log."""

from math import inf


class LogThrottle:
    """Counts how often something happened, and decides when to log that."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._logged_s = -inf
        self._times = 0

    def due(self, now_s: float) -> int:
        """Count one more; return how many there were since the last line if one is due now, else 0. The first
        is due at once, later ones every `every_s` at most."""
        self._times += 1
        if now_s - self._logged_s < self._every_s:
            return 0
        times, self._logged_s, self._times = self._times, now_s, 0
        return times
