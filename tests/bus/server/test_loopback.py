"""Servers that everybody on the network could use are refused."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from bus.connection import Bus
from bus.errors import ConfigError
from bus.server.nats_server import is_loopback
from launch.services.bus import serve_bus
from storage.settings.weights_transport import ServerConfig
from storage.weights.blob_http import BlobServer, file_in


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_is_known(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "host-a", ""])
def test_bus_beyond_loopback_is_refused_with_the_remedy(host: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="--insecure"):
        asyncio.run(serve_bus(host, 0, tmp_path / "bus", asyncio.Event()))
    assert not (tmp_path / "bus").exists()


@pytest.mark.nats
async def test_blobs_are_not_served_to_a_network_that_does_not_reach_the_bus(bus: Bus, tmp_path: Path):
    open_to_all = BlobServer(
        partial(file_in, tmp_path), ServerConfig(host="0.0.0.0"), setting="learner.x.port"
    )
    with pytest.raises(ConfigError, match=r"learner\.x\.host=0\.0\.0\.0 .*leave it out"):
        await open_to_all.start(bus)
    server = BlobServer(partial(file_in, tmp_path), ServerConfig(), setting="learner.x.port")
    assert (await server.start(bus)).startswith("http://127.0.0.1:")
    await server.close()
