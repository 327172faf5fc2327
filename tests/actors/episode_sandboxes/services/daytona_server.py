"""A server that speaks what the package `daytona` asks of Daytona: its API, and the toolbox in each sandbox.

No account was had. Each sandbox is one in namespaces, so that commands are carried out for real."""

from contextlib import asynccontextmanager

from aiohttp import MultipartWriter, web

from tests.actors.episode_sandboxes.services.places import Places

USUAL = {
    "organizationId": "o", "user": "root", "env": {}, "public": False, "target": "us", "gpu": 0,
    "state": "started", "kvm": False, "networkBlockAll": True,
}  # fmt: skip


class Daytona(Places):
    """What was asked for, and the sandboxes that run."""

    def app(self):
        app = web.Application(client_max_size=1 << 26, middlewares=[known])
        app.router.add_post("/sandbox", self.create)
        app.router.add_get("/sandbox", self.show)
        app.router.add_delete("/sandbox/{id}", self.remove)
        app.router.add_post("/toolbox/{id}/process/execute", self.execute)
        app.router.add_post("/toolbox/{id}/files/bulk-upload", self.write)
        app.router.add_post("/toolbox/{id}/files/bulk-download", self.read)
        return app

    async def create(self, request):
        body = await request.json()
        if body["buildInfo"]["dockerfileContent"].strip() == "FROM forbidden":
            return web.json_response({"message": "no access to the template", "statusCode": 403}, status=403)
        return web.json_response(self.shown(request, await self.started(body)))

    def shown(self, request, name):
        body = self.described[name]
        return {
            **USUAL,
            **{key: body[key] for key in ("labels", "cpu", "memory", "disk")},
            "id": name,
            "name": name,
            "toolboxProxyUrl": f"{request.url.origin()}/toolbox",
        }

    async def show(self, request):
        return web.json_response({"items": [self.shown(request, name) for name in self.running], "total": 1})

    async def remove(self, request):
        name = request.match_info["id"]
        shown = self.shown(request, name) if name in self.running else None
        await self.ended(name)
        return web.json_response({**shown, "state": "destroying"}) if shown else gone()

    def check(self, asked):
        """See that what was asked for is what the settings say."""
        wish = {
            "cpu": 2, "memory": 3, "disk": 9, "networkBlockAll": False, "networkAllowList": "192.0.2.7/32",
            "autoDeleteInterval": 0, "autoStopInterval": 0, "ttlMinutes": 30,
        }  # fmt: skip
        assert {name: asked[name] for name in wish} == wish
        assert asked["buildInfo"]["dockerfileContent"].strip() == "FROM tiny:1"

    def belongs_to(self, name, owner):
        self.described[name]["labels"]["sluice.owner"] = owner

    async def execute(self, request):
        if (sandbox := self.running.get(request.match_info["id"])) is None:
            return gone()
        body = await request.json()
        ran = await self.ran(sandbox, ("/bin/sh", "-c", body["command"]))
        return web.json_response({"exitCode": ran.status, "result": (ran.stdout + ran.stderr).decode()})

    async def write(self, request):
        form = await request.post()
        sandbox, file = self.running[request.match_info["id"]], form["files[0].file"]
        assert (
            await self.ran(sandbox, ("/bin/sh", "-c", f"cat > {form['files[0].path']}"), file.file.read())
        ).end
        return web.json_response({})

    async def read(self, request):
        [path] = (await request.json())["paths"]
        ran = await self.ran(self.running[request.match_info["id"]], ("/bin/cat", path))
        with MultipartWriter("form-data") as parts:
            part = parts.append(ran.stdout, {"Content-Type": "application/octet-stream"})
            part.set_content_disposition("form-data", quote_fields=False, name="file", filename=path)
        return web.Response(body=parts, headers=parts.headers)


def gone():
    """The answer about a sandbox that is not there."""
    return web.json_response({"message": "Sandbox not found", "statusCode": 404}, status=404)


@web.middleware
async def known(request, handler):
    if request.headers.get("Authorization") != "Bearer secret":
        return web.json_response({"message": "Unauthorized", "statusCode": 401}, status=401)
    return await handler(request)


@asynccontextmanager
async def serving():
    """The service, and the variables by which its package finds it."""
    service = Daytona()
    runner = web.AppRunner(service.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield (
        service,
        {"DAYTONA_API_URL": f"http://127.0.0.1:{runner.addresses[0][1]}", "DAYTONA_API_KEY": "secret"},
    )
    await runner.cleanup()
    await service.close()
