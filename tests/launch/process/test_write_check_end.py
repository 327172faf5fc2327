"""The check that a server stores ends quietly when its server is gone."""

import asyncio
from pathlib import Path

import pytest
import uvloop

from bus.server import NatsServer
from launch.process import write_check

STREAM_TIMEOUT_S = 10.0


@pytest.mark.slow  # a closed transport shows itself only some moments after the server's death
@pytest.mark.nats
def test_check_of_a_server_that_died_is_cancelled_without_another_error(tmp_path: Path):
    async def end_after(directory: Path, wait_s: float) -> None:
        server = NatsServer(directory)
        await server.start()
        checking = asyncio.create_task(write_check.until_it_cannot_store(server.url))
        async with asyncio.timeout(STREAM_TIMEOUT_S):
            while not any(directory.rglob("*.blk")):  # noqa: ASYNC110, ASYNC240 - the server tells nobody
                await asyncio.sleep(0.05)
        await server.kill()
        await asyncio.sleep(wait_s)
        checking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await checking

    for number, wait_s in enumerate((0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6)):
        uvloop.run(end_after(tmp_path / str(number), wait_s))
