import asyncio

import nats.errors
import psutil
import pytest
from nats.aio.client import Client

from bus.server import free_port
from launch.process.services import serve_bus

pytestmark = pytest.mark.nats


async def stored(client: Client, *, within_s: float) -> None:
    """Return once a message is stored on the stream "kept", which is made if it is missing."""
    js = client.jetstream(timeout=1)
    async with asyncio.timeout(within_s):
        while True:
            try:
                await js.add_stream(name="kept", subjects=["kept"])
                await js.publish("kept", b"1")
            except nats.errors.Error:  # not yet
                await asyncio.sleep(0.05)
            else:
                return


@pytest.mark.slow
async def test_a_bus_whose_disk_was_full_stores_again(tmp_path):
    port, stop = free_port("127.0.0.1"), asyncio.Event()
    serving = asyncio.create_task(serve_bus("127.0.0.1", port, tmp_path / "bus", stop))
    client = Client()
    async with asyncio.timeout(20):
        while not client.is_connected:
            try:
                await client.connect(
                    f"nats://127.0.0.1:{port}", max_reconnect_attempts=-1, reconnect_time_wait=0.1
                )
            except (OSError, nats.errors.Error):
                await asyncio.sleep(0.05)
    await stored(client, within_s=20)
    [server] = [p for p in psutil.Process().children() if "nats-server" in p.name()]
    _, hard = server.rlimit(psutil.RLIMIT_FSIZE)
    server.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
    with pytest.raises(nats.errors.Error):
        await client.jetstream(timeout=1).publish("kept", b"2")
    server.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))
    await stored(client, within_s=60)
    await client.close()
    stop.set()
    await serving
