"""The groups of the next step, which are asked for while the step before is trained."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from bus.errors import NoActorsError, UnreadableGroupsError
from bus.requests import BatchLease
from bus.waiting import cancelled, ended_before
from learner.progress.progress import Progress
from learner.world.rank import Rank
from learner.world.world import World
from storage.client.reader import ReplayReader


class NextBatch:
    """Leases the groups of a step after the other, and has every rank fetch its own."""

    def __init__(
        self, reader: ReplayReader, world: World, progress: Progress, *,
        steps: int, on_wait: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Lease nothing yet.

        Args:
            reader: asks storage for groups.
            world: its ranks fetch them.
            progress: of the learner; it says from which version its steps count.
            steps: the last step that is trained.
            on_wait: called with what a lease waits for, in words, and with "" when it has come.
        """
        self._reader, self._world, self._progress = reader, world, progress
        self._steps = steps
        self._on_wait = on_wait
        self._fetching: asyncio.Task[BatchLease] | None = None

    async def take(self, step: int, stop: asyncio.Event) -> BatchLease | None:
        """Return the groups of a step, and ask for those of the step after; None if `stop` came first.

        That no actors were there while the step before was trained is asked for again: some may have come."""
        if self._fetching is not None and _found_no_actors(self._fetching):
            self._fetching = None
        while True:
            fetching = self._fetching = self._fetching or self._begin(step)
            if not await ended_before(stop, fetching):
                return None
            while (readable := await self._world.call(Rank.fetched_by_all, step)) is None:
                if stop.is_set():
                    return None
            self._fetching = None
            if readable:  # else there are others by now
                break
        if step < self._steps:
            self._fetching = self._begin(step + 1)
        return fetching.result()

    async def drop(self) -> None:
        """Stop asking; what was leased is not taken any more."""
        if self._fetching is not None:
            await cancelled(self._fetching)
            self._fetching = None

    def _begin(self, step: int) -> asyncio.Task[BatchLease]:
        return asyncio.create_task(self._fetch(step), name=f"fetch batch {step}")

    async def _fetch(self, step: int) -> BatchLease:
        version = self._progress.trains_from + step - 1
        while True:
            lease = await self._reader.lease(step, version, on_wait=self._on_wait)
            self._on_wait("")
            with suppress(UnreadableGroupsError):  # which was reported: the next lease has other groups
                await self._world.fetch(lease)
                return lease


def _found_no_actors(fetching: asyncio.Task[BatchLease]) -> bool:
    return fetching.done() and not fetching.cancelled() and isinstance(fetching.exception(), NoActorsError)
