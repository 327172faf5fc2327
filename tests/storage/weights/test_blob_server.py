"""What the blob server does not serve, and whom it does not wait for."""

import asyncio
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from bus.connection import Bus
from storage.settings.weights_transport import ServerConfig
from storage.weights import blob_http
from storage.weights.blob_http import BlobServer, file_in


@pytest.mark.nats
async def test_links_and_long_names_are_not_found(bus: Bus, tmp_path: Path):
    served = tmp_path / "served"
    served.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (served / "link.blob").symlink_to(tmp_path / "secret")
    (served / "own.blob").write_bytes(b"own")
    server = BlobServer(partial(file_in, served), ServerConfig(), setting="x.port")
    url = await server.start(bus)
    async with aiohttp.ClientSession() as session:
        missing = ("link.blob", "%00.blob", "a%00b.blob", "%ff.blob", "a" * 5000 + ".blob")
        for name, status in (*((name, 404) for name in missing), ("own.blob", 200)):
            async with session.get(f"{url}/{name}") as answer:
                assert answer.status == status, name[:20]
    await server.close()


@pytest.mark.nats
async def test_connections_that_ask_for_nothing_give_way(bus: Bus, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(blob_http, "most_connections", lambda: 8)
    (tmp_path / "own.blob").write_bytes(b"own")
    server = BlobServer(partial(file_in, tmp_path), ServerConfig(), setting="x.port")
    url = await server.start(bus)
    port = int(url.rpartition(":")[2])
    mute = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
    async with asyncio.timeout(60), aiohttp.ClientSession() as session, session.get(f"{url}/own.blob") as got:
        assert await got.read() == b"own"
        await asyncio.gather(*(reader.read() for reader, _ in mute[:20]))  # ended by the server
    for _, writer in mute:
        writer.close()
    await server.close()
