"""Seconds of the parts of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepTimes:
    """Adds up the seconds of each part of a step. On a GPU they are those of its own queue, for which nobody
    waits until `seconds` is asked."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, _Mark, _Mark]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is done inside, if it does not raise, as a part of that name."""
        begin = _Mark()
        yield
        self._spans.append((name, begin, _Mark()))

    def seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, begin, end in self._spans:
            found[name] = found.get(name, 0.0) + begin.seconds_until(end)
        return found


class _Mark:
    def __init__(self) -> None:
        self._time_s = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def seconds_until(self, later: "_Mark") -> float:
        if self._event is None or later._event is None:
            return later._time_s - self._time_s
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1000
