"""What a program writes: read until nobody can write any more, bounded, and its end kept."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bus.waiting import cancelled

TAIL_BYTES = 4096
"""What is kept of a program's output: its end, which says what went wrong."""
READ_BYTES = 1 << 16
LAST_OUTPUT_S = 1.0


class Output:
    """Reads what a program writes, and keeps the end of it."""

    def __init__(self, most_bytes: int | None) -> None:
        self.overflown: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the program has written more than it may."""
        self._most_bytes = most_bytes
        self._size = 0
        self._tail = b""
        self._reading: asyncio.Task[None] | None = None

    @property
    def tail(self) -> str:
        """Return the end of the output; what is no UTF-8 is replaced."""
        return self._tail.decode(errors="replace").strip()

    def begin(self, reader: asyncio.StreamReader) -> None:
        """Read until nobody can write any more."""
        self._reading = asyncio.create_task(self._read(reader), name="output of a program")

    async def settle(self) -> None:
        """Wait a moment for what was written last."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=LAST_OUTPUT_S)

    async def close(self) -> None:
        if self._reading is not None:
            await cancelled(self._reading)
        self.overflown.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while part := await reader.read(READ_BYTES):
            self._size += len(part)
            self._tail = (self._tail + part)[-TAIL_BYTES:]
            limit = self._most_bytes
            if limit is not None and self._size > limit and not self.overflown.done():
                self.overflown.set_result(None)


@asynccontextmanager
async def output_pipe(most_bytes: int | None) -> AsyncIterator[tuple[Output, int]]:
    """Yield a reader, and the descriptor of the pipe into which a program writes. asyncio's own pipes would
    have `wait` last until every process that inherited one has ended."""
    reading, writing = os.pipe()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", buffering=0)
    )
    output = Output(most_bytes)
    output.begin(reader)
    try:
        yield output, writing
    finally:
        await output.close()
        transport.close()
