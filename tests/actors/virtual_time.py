"""An event loop whose clock jumps to the next timer: hours pass at once, and waiting for nothing fails."""

import asyncio
from collections.abc import Coroutine
from typing import Any

LIMIT_S = 10_000
"""A test that takes so long on the virtual clock waits for what will never come."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can run."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        timers = [handle.when() for handle in self._scheduled if not handle.cancelled()]
        if not self._ready and not self._stopping:
            if not timers:
                raise RuntimeError("deadlock: nothing is left that could happen")
            self._now_s = max(self._now_s, min(timers))
            if self._now_s > LIMIT_S:
                raise RuntimeError(f"still not done after {LIMIT_S} s")
        # asyncio runs timers a nanosecond early: whoever then looks at the clock must not find it before
        due = [when for when in timers if when < self._now_s + self._clock_resolution]
        self._now_s = max([self._now_s, *due])
        super()._run_once()


def run_virtually(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine as `asyncio.run` does, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(coroutine)
