"""Values that appear one by one while a run goes on, for `for` and for `async for`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Generic, TypeVar

from bus.errors import SluiceError

T = TypeVar("T")
POLL_S = 0.5
"""Time between two looks for new values."""


class Stream(Generic[T]):
    """Values in their order, from the first one on: those that are there, then those that come.

    It ends with the run. Each `for` and each `async for` over it begins anew."""

    def __init__(
        self, begin: Callable[[], Callable[[], Sequence[T]]], running: Callable[[], bool],
        raise_failure: Callable[[], None],
    ) -> None:  # fmt: skip
        """`begin` makes what takes the next values, and `running` says whether more may follow.

        `raise_failure` is called after the last value; it raises the error that ended the run, if one did."""
        self._begin = begin
        self._running = running
        self._raise_failure = raise_failure

    def __iter__(self) -> Iterator[T]:
        """Wait in this thread for what is not there yet."""
        take, over = self._begin(), False
        while not over:
            over, found = self._look(take)
            yield from found
            if not (over or found):
                time.sleep(POLL_S)

    async def __aiter__(self) -> AsyncIterator[T]:
        """Wait without holding up the event loop."""
        take, over = self._begin(), False
        while not over:
            over, found = await asyncio.to_thread(self._look, take)
            for value in found:
                yield value
            if not (over or found):
                await asyncio.sleep(POLL_S)

    def _look(self, take: Callable[[], Sequence[T]]) -> tuple[bool, Sequence[T]]:
        """Return whether it is over, and the next values. Raises the failure of the run after the last."""
        ended = not self._running()  # first: what came last is taken
        try:
            found = take()
        except SluiceError:
            if ended:
                self._raise_failure()  # it says why the files are missing
            raise
        over = ended and not found
        if over:
            self._raise_failure()
        return over, found
