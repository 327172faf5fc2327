"""A server that speaks what the package `e2b` asks of E2B: its API, and that of the process in each sandbox.

No account was had. Each sandbox is one in namespaces, so that commands are carried out for real."""

import base64
import json
import struct
from contextlib import asynccontextmanager

from aiohttp import web

from tests.actors.episode_sandboxes.services.places import Places

FRAME = struct.Struct(">BI")
"""Head of a message of the Connect protocol: flags, of which 2 is the last message, and its size."""
GONE = {"sandboxId": "x", "message": "The sandbox was not found", "code": 502}


class E2B(Places):
    """What was asked for, and the sandboxes that run."""

    def app(self):
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v2/sandboxes", self.create)
        app.router.add_get("/v2/sandboxes", self.show)
        app.router.add_delete("/sandboxes/{id}", self.kill)
        app.router.add_post("/process.Process/Start", self.start_process)
        app.router.add_get("/files", self.read)
        app.router.add_post("/files", self.write)
        app.router.add_get("/health", self.health)
        return app

    async def create(self, request):
        if request.headers.get("X-API-KEY") != "e2b_secret":
            return web.json_response({"code": 401, "message": "Invalid API key"}, status=401)
        body = await request.json()
        if body["templateID"] == "forbidden":
            return web.json_response({"code": 403, "message": "no access to the template"}, status=403)
        name = await self.started(body)
        token = {"envdAccessToken": f"token-{name}", "envdVersion": "0.6.3"}
        return web.json_response(
            {"templateID": body["templateID"], "sandboxID": name, "clientID": "c", **token}, status=201
        )

    async def show(self, _):
        said = {
            "templateID": "t", "clientID": "c", "startedAt": "2026-01-01T00:00:00Z", "cpuCount": 1,
            "memoryMB": 1, "endAt": "2026-01-01T00:00:00Z", "diskSizeMB": 1, "state": "running",
            "envdVersion": "0.6.3",
        }  # fmt: skip
        found = self.described.items()
        return web.json_response(
            [{**said, "sandboxID": name, "metadata": body["metadata"]} for name, body in found]
        )

    async def kill(self, request):
        return web.Response(status=204 if await self.ended(request.match_info["id"]) else 404)

    def check(self, asked):
        """See that what was asked for is what the settings say."""
        assert (asked["templateID"], asked["timeout"]) == ("tiny:1", 1800)
        assert asked["network"] == {"allowOut": ["192.0.2.7/32"], "denyOut": ["0.0.0.0/0"]}

    def belongs_to(self, name, owner):
        self.described[name]["metadata"]["sluice.owner"] = owner

    def sandbox_of(self, request):
        """The sandbox of a request to its own process, which has to give its token and its user."""
        name = request.headers["E2b-Sandbox-Id"]
        if name not in self.running:
            raise web.HTTPBadGateway(text=json.dumps(GONE), content_type="application/json")
        assert request.headers["X-Access-Token"] == f"token-{name}"
        return self.running[name]

    async def health(self, request):
        self.sandbox_of(request)
        return web.Response(status=204)

    async def start_process(self, request):
        sandbox = self.sandbox_of(request)
        assert request.headers["Authorization"] == "Basic " + base64.b64encode(b"root:").decode()
        assert request.content_type == "application/connect+json"
        process = json.loads((await request.read())[FRAME.size :])["process"]
        words = (process["cmd"], *process["args"])
        assert words[:3] == ("/bin/bash", "-l", "-c")
        answer = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await answer.prepare(request)
        await self.send(answer, start={"pid": 7})
        ran = await self.ran(sandbox, words)
        for kind, output in (("stdout", ran.stdout), ("stderr", ran.stderr)):
            if output:
                await self.send(answer, data={kind: base64.b64encode(output).decode()})
        await self.send(answer, end={"exitCode": ran.status, "exited": True, "status": "exited"})
        await answer.write(FRAME.pack(2, 2) + b"{}")
        return answer

    async def send(self, answer, **event):
        message = json.dumps({"event": event}).encode()
        await answer.write(FRAME.pack(0, len(message)) + message)

    async def read(self, request):
        assert request.query["username"] == "root"
        ran = await self.ran(self.sandbox_of(request), ("/bin/cat", request.query["path"]))
        return web.Response(body=ran.stdout)

    async def write(self, request):
        assert request.query["username"] == "root"
        path, form = request.query["path"], await request.post()
        await self.written(self.sandbox_of(request), path, form["file"].file.read())
        return web.json_response([{"name": path.rpartition("/")[2], "type": "file", "path": path}])


@asynccontextmanager
async def serving():
    """The service, and the variables by which its package finds it."""
    service = E2B()
    runner = web.AppRunner(service.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield service, {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": "e2b_secret"}
    await runner.cleanup()
    await service.close()
