"""What recurs for hundreds of leases at once, said in one line."""

from math import inf


class Seldom:
    """Counts how often something happened, and says when that is to be told."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._told_s = -inf
        self._times = 0

    def due(self, now_s: float) -> int:
        """It happened: how often since it was told last if it is to be told now, at the first and later every
        `every_s` at most; else 0."""
        self._times += 1
        if now_s - self._told_s < self._every_s:
            return 0
        times, self._told_s, self._times = self._times, now_s, 0
        return times
