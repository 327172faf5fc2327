"""Profiles of a learner that trains, for `launch profile`: each rank traces whole steps of the live run."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from bus.codec import Json, Message
from bus.connection import Bus
from bus.errors import ConfigError
from bus.requests import Profiled, ProfileRequest
from learner.metrics.profiler import RankProfile
from learner.world.rank import Rank
from learner.world.world import World
from storage.metrics.records import number

log = structlog.get_logger()
PARTS = {
    "time/waiting_for_batch_s": "waiting for the batch",
    "time/logprobs_s": "log-probs",
    "time/update_s": "updates",
    "time/optimizer_s": "the optimizer, of the updates",
    "time/critic_s": "the critic",
    "time/publish_stall_s": "publication",
    "time/checkpoint_s": "checkpoints",
}
"""Parts of a step in words, by the names of its numbers."""
LEAST_SHARE = 0.001
"""Share of a step's time below which a part is not named."""


@dataclass
class _Asked:
    steps: int
    answer: asyncio.Future[Profiled]
    first_step: int | None = None
    """The first step that is traced; None before it begins."""
    rows: list[Mapping[str, Json]] = field(default_factory=list)
    """Numbers of each step that was traced."""


class Profiling:
    """Takes one profile at a time, between whole steps of the learner's loop."""

    def __init__(self, bus: Bus, world: World, run: Path) -> None:
        """Write into `run`, the directory of the run."""
        self._bus = bus
        self._world = world
        self._run = run
        self._asked: _Asked | None = None

    async def serve(self, finished: asyncio.Event) -> None:
        serving = await self._bus.serve(self._bus.subject("rpc", "profile"), ProfileRequest, self._answer)
        await finished.wait()
        await serving.unsubscribe()

    async def _answer(self, request: ProfileRequest) -> list[Message]:
        if self._asked is not None:
            raise ConfigError(f"a profile of {self._asked.steps} steps is being taken: ask again after it")
        asked = self._asked = _Asked(request.steps, asyncio.get_running_loop().create_future())
        return [await asked.answer]

    async def after_step(self, step: int, row: Mapping[str, Json]) -> None:
        """Begin with the next step, or end, if that is asked; `row` has the numbers of this one."""
        if (asked := self._asked) is None:
            return
        if asked.first_step is None:
            asked.first_step = step + 1
            log.info("profile_begins", first_step=step + 1, steps=asked.steps)
            await self._world.call(Rank.begin_profile)
            return
        asked.rows.append(row)
        if len(asked.rows) == asked.steps:
            await self._end(asked, asked.first_step)

    async def end(self) -> None:
        """End with the steps so far: there are no more."""
        if (asked := self._asked) is None:
            return
        if asked.first_step is not None and asked.rows:
            await self._end(asked, asked.first_step)
        else:
            self._asked = None
            asked.answer.set_exception(ConfigError("the learner ended before it took a whole step"))

    async def _end(self, asked: _Asked, first: int) -> None:
        last = first + len(asked.rows) - 1
        directory = self._run.absolute() / "profiles" / f"steps-{first}-{last}"
        ranks = await self._world.call(Rank.end_profile, directory)
        lines = tuple(described(first, asked.rows, ranks))
        if not any(one.problem for one in ranks):
            try:
                (directory / "report.txt").write_text("\n".join(lines) + "\n")
            except OSError as error:  # the learner trains on, as where the traces cannot be written
                lines = (f"the report cannot be written into {directory}: {error}", *lines)
        log.info("profile_taken", first_step=first, steps=len(asked.rows), directory=str(directory))
        self._asked = None
        asked.answer.set_result(Profiled(directory=str(directory), lines=lines))


def described(first: int, rows: Sequence[Mapping[str, Json]], ranks: Sequence[RankProfile]) -> Iterator[str]:
    """Say in lines how long the steps took, by part, how idle each rank was, and what took its time."""
    yield from (one.problem for one in ranks if one.problem)
    each_s = ranks[0].seconds / len(rows)
    yield f"{len(rows)} steps from step {first} on took {each_s:.3g} s each, of which:"
    for name, words in PARTS.items():
        told = [value for row in rows if (value := number(row, name)) == value]
        if (mean := sum(told) / len(rows)) > LEAST_SHARE * each_s:
            yield f"  {mean:8.3f} s  {mean / each_s:6.1%}  {words}"
    for rank, one in enumerate(ranks):
        idle = "the GPU ran no kernel" if one.on_gpu else "the CPU ran no operator of torch"
        yield f"rank {rank}: {idle} in {one.idle_fraction:.1%} of the time"
    yield f"what took most of rank 0's {'GPU' if ranks[0].on_gpu else 'CPU'}:"
    for work in ranks[0].top:
        share = work.seconds / ranks[0].seconds
        yield f"  {work.seconds:8.3f} s  {share:6.1%}  {work.name} ({work.calls} calls)"
