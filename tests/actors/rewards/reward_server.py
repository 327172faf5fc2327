"""A server for rewards, whose replies a test writes."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Reply = Callable[[int, dict], web.Response | Awaitable[web.Response]]


class RewardServer:
    """Answers requests by `reply(number, body)`, a response; it keeps the bodies and headers that came."""

    def __init__(self, reply: Reply) -> None:
        self.url = ""
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self._reply = reply

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        reply = self._reply(len(self.bodies), self.bodies[-1])
        return await reply if inspect.isawaitable(reply) else reply


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[RewardServer]:
    """Run a server on a free port."""
    server, app = RewardServer(reply), web.Application(client_max_size=1 << 26)
    app.router.add_post("/{tail:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()
