"""`launch reward`: gives rewards from a file or a pipe to trajectories that wait for them."""

import asyncio
import os
import platform
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from bus.connection.bus import Bus
from bus.errors import ConfigError
from launch.settings.run_config import RunConfig
from storage.account.records import GIVEN
from storage.client.rewards import RewardSender, Tally, give_lines

STDIN = Path("-")
CHUNK = 1024
"""Number of lines that are read ahead, and of rewards that are sent together."""


async def give_rewards(where: RunConfig, file: Path, stop: asyncio.Event) -> Tally:
    """Give the reward of each line of `file`, or of standard input as they come, until its end or `stop`.
    Raises `ConfigError` for a file that cannot be read, or a run that is not on the bus."""
    tally = Tally()
    with ExitStack() as opened:
        try:
            source = sys.stdin.buffer if file == STDIN else opened.enter_context(file.open("rb"))
        except OSError as error:
            raise ConfigError(f"cannot read the rewards in {file}: {error.strerror}") from error
        async with Bus.connect(where.bus, where.run, name="rewards") as bus:
            account = where.directory / where.run / GIVEN
            # of this process alone: on other hosts the same command keeps records that are not here
            own = f"launch reward {file} {platform.node()}-{os.getpid()}"
            sender = await RewardSender.to_run(bus, source=own, account=account)
            await give_lines(sender, _arriving(source, stop), tally)
    return tally


async def _arriving(source: BinaryIO, stop: asyncio.Event) -> AsyncIterator[list[bytes]]:
    """Yield the lines that came since the last ones, as soon as there are some. They are read in a daemon
    thread: one that waits for a pipe cannot be stopped otherwise."""
    loop, lines, free_lines = (
        asyncio.get_running_loop(),
        asyncio.Queue[bytes | None](),
        threading.Semaphore(CHUNK),
    )

    def read() -> None:
        with suppress(RuntimeError):  # the loop has ended
            for line in source:
                free_lines.acquire()
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, name="lines", daemon=True).start()
    stopping = asyncio.create_task(stop.wait())
    stopping.add_done_callback(lambda _: lines.put_nowait(None))
    while (line := await lines.get()) is not None:
        chunk = [line]
        while not lines.empty() and len(chunk) < CHUNK and (line := lines.get_nowait()) is not None:
            chunk.append(line)
        free_lines.release(len(chunk))
        yield chunk
        if line is None:
            break
    stopping.cancel()
