"""A server that speaks what sandboxes need of Kubernetes' API, as its reference describes it: no cluster runs
here. Each pod is a sandbox in namespaces, so that commands are carried out for real."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

from aiohttp import WSMsgType, web

from actors.episode_sandboxes.base import Command
from actors.episode_sandboxes.namespaces import NamespaceBackend
from actors.episode_sandboxes.relay import copy
from actors.settings.episode_sandboxes import NamespaceSandboxes, SandboxLimits

PODS = "/api/v1/namespaces/train/pods"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/train/networkpolicies"


class Cluster:
    """What was made, and the pods that run."""

    def __init__(self):
        self.backend = NamespaceBackend.from_config(NamespaceSandboxes())
        self.pods, self.described, self.policies = {}, {}, []
        self.ways = []
        self.actors = {}
        """Addresses of pods that are no sandboxes."""
        self.fails = False
        """Whether pods end before they run."""

    def app(self):
        app = web.Application(middlewares=[known])
        app.router.add_post(POLICIES, self.add_policy)
        app.router.add_post(PODS, self.add)
        app.router.add_get(PODS, self.list)
        app.router.add_get(PODS + "/{name}", self.show)
        app.router.add_delete(PODS + "/{name}", self.remove)
        app.router.add_get(PODS + "/{name}/exec", self.exec)
        return app

    async def add_policy(self, request):
        self.policies.append(await request.json())
        names = [one["metadata"]["name"] for one in self.policies]
        status = 201 if len(set(names)) == len(names) else 409
        return web.json_response({"kind": "Status", "message": "exists"}, status=status)

    async def add(self, request):
        body = await request.json()
        name = body["metadata"]["name"]
        if body["spec"]["containers"][0]["image"] == "forbidden":
            return web.json_response({"kind": "Status", "message": "pods is forbidden"}, status=403)
        self.described[name] = body
        return web.json_response({**body, "status": {"phase": "Pending"}}, status=201)

    async def list(self, request):
        label = request.query["labelSelector"]
        items = [one for one in self.described.values() if label in one["metadata"]["labels"]]
        return web.json_response({"kind": "PodList", "items": items})

    async def show(self, request):
        name = request.match_info["name"]
        if name in self.actors:
            status = {"phase": "Running", "podIP": self.actors[name]}
            return web.json_response({"metadata": {"name": name, "uid": f"uid of {name}"}, "status": status})
        if name not in self.described:
            return web.json_response({"kind": "Status", "message": "not found"}, status=404)
        phase = "Failed" if self.fails else "Running" if name in self.pods else "Pending"
        if name not in self.pods:
            self.pods[name] = await self.backend.start(None, SandboxLimits())
            await self.let_out(name)
        return web.json_response({"metadata": {"name": name}, "status": {"phase": phase}})

    async def let_out(self, name):
        """Do what a network policy does: connect a port of the pod's loopback to that of this host."""
        label = self.described[name]["metadata"]["labels"]["gateway"]
        for policy in (one["spec"] for one in self.policies):
            if policy["podSelector"]["matchLabels"].get("gateway") == label:
                [way] = policy["egress"]
                assert way["to"] == [{"ipBlock": {"cidr": "127.0.0.1/32"}}]
                [port] = [one["port"] for one in way["ports"]]
                served = await asyncio.start_server(to_port(port), sock=await self.pods[name].listen(port))
                self.ways.append(served)

    async def remove(self, request):
        pod = self.pods.pop(request.match_info["name"], None)
        self.described.pop(request.match_info["name"], None)
        if pod is None:
            return web.json_response({"kind": "Status", "message": "not found"}, status=404)
        await pod.close()
        return web.json_response({"kind": "Pod"})

    async def exec(self, request):
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return web.json_response({"kind": "Status", "message": "not found"}, status=404)
        stream = web.WebSocketResponse(protocols=["v5.channel.k8s.io"], max_msg_size=0)
        await stream.prepare(request)
        stdin = b""
        async for message in stream:
            assert message.type is WSMsgType.BINARY
            if message.data == b"\xff\0":
                break
            assert message.data[0] == 0
            stdin += message.data[1:]
        words = tuple(request.query.getall("command"))
        command = Command(words=words, stdin=stdin, timeout_s=60.0, output_bytes=1 << 22, directory="/")
        running = asyncio.create_task(pod.run(command))
        leaving = asyncio.create_task(stream.receive())
        await asyncio.wait([running, leaving], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await self.tell(stream, running.result())
        else:  # a command goes on where its client leaves
            await running
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        return stream

    async def tell(self, stream, ran):
        for channel, output in ((b"\1", ran.stdout), (b"\2", ran.stderr)):
            await stream.send_bytes(channel + output)
        status = ran.status if ran.status >= 0 else 128 - ran.status
        cause = {"reason": "ExitCode", "message": str(status)}
        failed = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
        await stream.send_bytes(b"\3" + json.dumps(failed if status else {"status": "Success"}).encode())


def to_port(port):
    """What brings a connection to a port of this host."""

    async def relay(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    return relay


@web.middleware
async def known(request, handler):
    if request.headers.get("Authorization") != "Bearer secret":
        return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
    return await handler(request)


@asynccontextmanager
async def cluster():
    """A cluster and its address."""
    found = Cluster()
    runner = web.AppRunner(found.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield found, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        for way in found.ways:
            way.close()
        await runner.cleanup()
        await found.backend.close()
