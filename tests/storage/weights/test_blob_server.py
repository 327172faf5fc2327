"""What the blob server does not serve, and whom it does not wait for."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

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


@pytest.mark.nats
async def test_a_reader_that_goes_away_is_no_error(bus: Bus, tmp_path: Path, monkeypatch, capfd):
    (tmp_path / "big.blob").write_bytes(bytes(64 << 20))
    server = BlobServer(partial(file_in, tmp_path), ServerConfig(), setting="x.port")
    port = int((await server.start(bus)).rpartition(":")[2])
    gone, send = asyncio.Event(), blob_http._send

    async def watched(*arguments: Any) -> Any:
        try:
            return await send(*arguments)
        finally:
            gone.set()

    monkeypatch.setattr(blob_http, "_send", watched)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /big.blob HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(60):
        await reader.readexactly(1 << 20)
        writer.transport.abort()
        await gone.wait()
    await server.close()
    assert "Traceback" not in capfd.readouterr().err
