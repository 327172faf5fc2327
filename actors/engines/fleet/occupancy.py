"""How much of its time an engine has had something to do."""

import asyncio


class Occupancy:
    """Sums over the time so far: differences of two readings say how idle an engine was in between."""

    def __init__(self) -> None:
        self._busy_s = self._request_s = self._since_s = 0.0
        self._count = 0

    def note(self, count: int) -> None:
        """Note how many requests it has from now on."""
        now_s = asyncio.get_running_loop().time()
        self._busy_s, self._request_s = self._until(now_s)
        self._since_s, self._count = now_s, count

    @property
    def busy_s(self) -> float:
        """Return the seconds with one request or more."""
        return self._until(asyncio.get_running_loop().time())[0]

    @property
    def request_s(self) -> float:
        """Return the seconds of each request, added up: over a span of time, its mean number of requests."""
        return self._until(asyncio.get_running_loop().time())[1]

    def _until(self, now_s: float) -> tuple[float, float]:
        passed_s = now_s - self._since_s if self._count else 0.0
        return self._busy_s + passed_s, self._request_s + passed_s * self._count
