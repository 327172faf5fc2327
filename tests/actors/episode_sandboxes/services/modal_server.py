# ruff: noqa: N802 - the protocol names its calls so
"""A server that speaks what the package `modal` asks of Modal: its API, and the router of commands.

No account was had. Each sandbox is one in namespaces, so that commands are carried out for real."""

import asyncio
import base64
from contextlib import asynccontextmanager

from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as router
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from tests.actors.episode_sandboxes.services.places import Places

IMAGE = "im-1"
TOKEN = "e30." + base64.b64encode(b'{"exp": 9999999999}').decode().rstrip("=") + ".x"


def answering(base):
    """A class of a service's calls, of which those that are not written here are refused."""

    def refused(name):
        async def call(_, stream):
            await stream.recv_message()
            raise GRPCError(Status.UNIMPLEMENTED, name)

        return call

    return type(base.__name__, (base,), {name: refused(name) for name in base.__abstractmethods__})


class Modal(Places, answering(ModalClientBase)):
    """What was asked for, and the sandboxes that run."""

    url = ""

    async def ClientHello(self, stream):
        assert stream.metadata["x-modal-token-id"] == "ak-1"
        await stream.recv_message()
        await stream.send_message(api.ClientHelloResponse())

    async def AuthTokenGet(self, stream):
        await stream.recv_message()
        await stream.send_message(api.AuthTokenGetResponse(token=TOKEN))

    async def EnvironmentGetOrCreate(self, stream):
        await stream.recv_message()
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        made = api.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=made))

    async def AppGetOrCreate(self, stream):
        assert (await stream.recv_message()).app_name == "sluice"
        await stream.send_message(api.AppGetOrCreateResponse(app_id="ap-1"))

    async def ImageGetOrCreate(self, stream):
        self.dockerfile = [*(await stream.recv_message()).image.dockerfile_commands]
        done = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)
        await stream.send_message(api.ImageGetOrCreateResponse(image_id=IMAGE, result=done))

    async def SandboxCreateV2(self, stream):
        asked = await stream.recv_message()
        if "FROM forbidden" in self.dockerfile:
            raise GRPCError(Status.PERMISSION_DENIED, "no access to the template")
        name = await self.started(asked)
        access = api.CommandRouterAccess(url=self.url, jwt=TOKEN)
        await stream.send_message(
            api.SandboxCreateV2Response(sandbox_id=name, task_id=f"ta-{name}V", command_router_access=access)
        )

    async def SandboxTerminateV2(self, stream):
        await self.ended((await stream.recv_message()).sandbox_id)
        await stream.send_message(api.SandboxTerminateResponse())

    async def SandboxListV2(self, stream):
        asked = await stream.recv_message()
        assert asked.app_id == "ap-1"
        names = [] if asked.before_timestamp else [*self.running]
        found = [api.SandboxInfo(id=name, created_at=1.0) for name in names]
        await stream.send_message(api.SandboxListResponse(sandboxes=found))

    async def SandboxTagsGetV2(self, stream):
        asked = self.described[(await stream.recv_message()).sandbox_id]
        await stream.send_message(api.SandboxTagsGetResponse(tags=asked.tags))

    def check(self, asked):
        """See that what was asked for is what the settings say."""
        made, limits = asked.definition, asked.definition.resources
        assert (made.timeout_secs, made.image_id, self.dockerfile[0]) == (1800, IMAGE, "FROM tiny:1")
        assert (limits.milli_cpu, limits.milli_cpu_max, limits.memory_mb, limits.memory_mb_max) == (
            2000, 2000, 3000, 3000,
        )  # fmt: skip
        assert [*made.network_access.allowed_cidrs] == ["192.0.2.7/32"]

    def belongs_to(self, name, owner):
        self.described[name].tags[0].tag_value = owner


class Router(answering(TaskCommandRouterBase)):
    """Carries out commands in the sandboxes of a service."""

    def __init__(self, service):
        self.service, self.commands = service, {}

    async def TaskExecStart(self, stream):
        asked = await stream.recv_message()
        if (name := asked.task_id[3:-1]) not in self.service.running:
            raise GRPCError(Status.NOT_FOUND, "the task has ended")
        self.commands[asked.exec_id] = Command(self.service, name, tuple(asked.command_args))
        await stream.send_message(router.TaskExecStartResponse())

    async def TaskExecStdinWrite(self, stream):
        asked = await stream.recv_message()
        command = self.commands[asked.exec_id]
        command.stdin[asked.offset :] = asked.data
        if asked.eof:
            command.begin()
        await stream.send_message(router.TaskExecStdinWriteResponse())

    async def TaskExecStdioRead(self, stream):
        asked = await stream.recv_message()
        ran = await asyncio.shield(self.commands[asked.exec_id].ran)
        is_out = asked.file_descriptor == router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        output = (ran.stdout if is_out else ran.stderr)[asked.offset :]
        for start in range(0, len(output), 1 << 20):
            await stream.send_message(
                router.TaskExecStdioReadResponse(data=output[start : start + (1 << 20)])
            )

    async def TaskExecWait(self, stream):
        ran = await asyncio.shield(self.commands[(await stream.recv_message()).exec_id].ran)
        await stream.send_message(router.TaskExecWaitResponse(code=ran.status))


class Command:
    """A command, which begins when its input is complete."""

    def __init__(self, service, name, words):
        self.service, self.name, self.words = service, name, words
        self.stdin = bytearray()
        self.ran = asyncio.get_running_loop().create_future()

    def begin(self):
        async def run():
            sandbox = self.service.running[self.name]
            self.ran.set_result(await self.service.ran(sandbox, self.words, bytes(self.stdin)))

        self.task = asyncio.create_task(run())


@asynccontextmanager
async def serving():
    """The service, and the variables by which its package finds it."""
    service = Modal()
    server = Server([service, Router(service)])
    await server.start("127.0.0.1", 0)
    service.url = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}"
    yield service, {"MODAL_SERVER_URL": service.url, "MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": "as-1"}
    server.close()
    await service.close()
