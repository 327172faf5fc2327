"""The port of an SGLang server of our own, which another may take before it, with a small program in its
place."""

import sys
from pathlib import Path

import pytest
from aiohttp import web

from actors.engines.sglang.server import server as servers
from actors.engines.sglang.server.server import OwnServer
from actors.settings.engines import SglangEngineConfig
from bus.errors import EngineError
from bus.server.nats_server import free_port

SERVES = """
import http.server, json, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
settings = json.loads(sys.argv[1])
http.server.HTTPServer((settings["host"], settings["port"]), Answer).serve_forever()
"""


async def test_another_server_at_the_port_is_not_taken_for_the_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, program = tmp_path / "model", tmp_path / "serves.py"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Tiny"]}')
    program.write_text(SERVES)
    monkeypatch.setattr(servers, "LAUNCHER", program)
    config = SglangEngineConfig(python=Path(sys.executable), server={"device": "cpu"}, start_timeout_s=60.0)
    port = free_port(servers.HOST)
    monkeypatch.setattr(servers, "free_port", lambda host: port)
    server = OwnServer(config, model, tmp_path / "engine.log", 0)

    async def healthy(request: web.Request) -> web.Response:
        return web.json_response({})

    stranger = web.Application()
    stranger.add_routes([web.get("/{path:.*}", healthy)])
    runner = web.AppRunner(stranger)
    await runner.setup()
    await web.TCPSite(runner, servers.HOST, port).start()
    client = await server.start()
    assert await client.healthy(5.0)  # it is the other one that answers
    with pytest.raises(EngineError, match="Address already in use"):
        await server.until_ready(client)
    await client.close()
    await runner.cleanup()
    client = await server.start()
    await server.until_ready(client)
    await client.close()
    await server.kill()
