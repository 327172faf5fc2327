"""A trace of what this rank's torch does over a few steps, and what took most of the time."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

TOP = 10
"""Kernels or operators that a profile names."""
MOST_ALLOCATIONS = 100_000
"""Latest allocations of a GPU's memory that a snapshot holds, each with its stack in Python: about 1 KB."""


class Work(NamedTuple):
    """Sums over the calls of a kernel, or of an operator without those that it calls."""

    name: str
    seconds: float
    calls: int


class RankProfile(NamedTuple):
    """What a trace says of one rank."""

    seconds: float
    idle_fraction: float
    """Share of the time in which the GPU ran no kernel, or the CPU no operator of torch."""
    on_gpu: bool
    top: tuple[Work, ...]
    problem: str = ""
    """Why the files could not be written."""


class Profiler:
    """Records what torch does between `begin` and `end`, both called on the thread that torch works on."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._begun_s = 0.0

    def begin(self) -> None:
        """Record from now on; on a GPU its memory too."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")
        # torch 2.11 warns of events that it would clear after further cycles, which there are none of
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()
        self._begun_s = time.monotonic()

    def end(self, directory: Path, rank: int) -> RankProfile:
        """Write the trace, and on a GPU a snapshot of its memory, into a directory; return what they say."""
        recorded, self._profile = self._profile, None
        assert recorded is not None, "`begin` comes first"
        on_gpu = ProfilerActivity.CUDA in recorded.activities
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.monotonic() - self._begun_s
        recorded.stop()
        problem = ""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(directory / f"rank-{rank}.trace.json.gz"))
            if on_gpu:
                snapshot = str(directory / f"rank-{rank}.memory.pickle")
                torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]
        except OSError as error:  # said in the answer: the other ranks wait for this one's share of it
            problem = f"rank {rank} cannot write into {directory}: {error}"
        finally:
            if on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        return _summary(recorded, seconds, on_gpu=on_gpu)._replace(problem=problem)


def _summary(recorded: profile, seconds: float, *, on_gpu: bool) -> RankProfile:
    traced: list[FunctionEvent] = recorded.events()  # type: ignore[no-untyped-call]
    events = [event for event in traced if _is_work(event, on_gpu=on_gpu)]
    sums: dict[str, tuple[float, int]] = {}
    for event in events:
        spent, calls = sums.get(event.name, (0.0, 0))
        took = event.time_range.end - event.time_range.start if on_gpu else event.self_cpu_time_total
        sums[event.name] = spent + took / 1e6, calls + 1
    work = sorted((Work(name, *found) for name, found in sums.items()), key=lambda one: -one.seconds)
    busy_s = covered(_spans(events)) / 1e6
    return RankProfile(seconds, max(0.0, 1 - busy_s / seconds), on_gpu, tuple(work[:TOP]))


def _is_work(event: FunctionEvent, *, on_gpu: bool) -> bool:
    """Tell kernels on a GPU from what only names them, and operators from the calls of CUDA's runtime."""
    is_on_gpu = event.device_type != DeviceType.CPU
    return is_on_gpu == on_gpu and not getattr(event, "is_user_annotation", False)


def _spans(events: Iterable[FunctionEvent]) -> Iterator[tuple[float, float]]:
    return ((event.time_range.start, event.time_range.end) for event in events)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length that spans cover together, of begin and end each."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
