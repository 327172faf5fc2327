"""Sandboxes in containers of Docker or Podman on this host, by the HTTP API (1.41) at the daemon's socket. A
container has no network and no capability. It ends with its episode, with its actor, or after its longest
life; what a daemon that was away has left, the next actor of this host removes."""

import asyncio
import json
import re
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import structlog

from actors.episode_sandboxes import relay
from actors.episode_sandboxes.base import GATEWAY_PORT, NEAR, WORKSPACE, Command, CommandEnd, CommandResult
from actors.episode_sandboxes.cpu_groups import PERIOD_US
from actors.episodes.errors import ToolError, ToolFailedError
from actors.episodes.task import JSON
from actors.sandboxes.owner import OWNER, is_orphan, this_process
from actors.settings.episode_sandboxes import ContainerSandboxes, SandboxLimits
from bus.errors import ConfigError
from bus.waiting import cancelled

log = structlog.get_logger()
API = "/v1.41"
LIVE = 'exec 3<&0; sleep "$0" & life=$!; (cat <&3 > /dev/null; kill "$life") & wait "$life"'
"""Script of a container, which ends after its longest life, or with the connection of its actor."""
BEGIN_EXEC = 'echo $$ > "$0"; exec "$@"'
"""Script that notes the process of a command, so that it can be ended."""
END_EXEC = 'kill -9 "-$(cat "$0")"'  # Debian's shell knows no "--" here
RELAY = Path(relay.__file__).read_text()
SHARED = "/run/sluice"
"""Where a container finds the socket to which the relay in it connects, in a directory that it only reads."""
PREFIX = "sluice-sandbox-"
"""Beginning of the names of these directories, which the owner of one follows."""
REQUEST_TIMEOUT_S = 120.0
LAST_OUTPUT_S = 0.2
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 0.5
"""Time until the daemon is asked whether a command has ended whose output goes on, at first and at most."""
LOOKS = 40
HELD = ("Memory", "PidsLimit", "CpuQuota")
BACKLOG = 1024
KILLED = 137
"""Status of a command that a signal has killed."""
OF_MEMORY = "/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
"""Files in which a container finds how often it lacked memory, of both versions of control groups."""
FRAME = struct.Struct(">BxxxI")
"""Head of a part of the output: 1 for output, 2 for errors, and its length."""


class ContainerBackend:
    """Starts containers. Raises ConfigError where there is no daemon."""

    def __init__(self, config: ContainerSandboxes) -> None:
        if not config.socket.is_socket():
            raise ConfigError(
                f"a sandbox's socket={config.socket}: no daemon listens there; start Docker, or give the "
                "socket of Podman (podman system service)"
            )
        self._config = config
        self._session: aiohttp.ClientSession | None = None
        self._starting = asyncio.Lock()
        self.left: set[str] = set()
        """Containers that could not be removed, as while the daemon starts again."""
        self._has_looked = False
        """Whether somebody has looked if the daemon holds containers to their limits."""

    async def start(
        self, image: str | None, limits: SandboxLimits, gateway: str | None = None
    ) -> "Container":
        """Start a container of an image, which the daemon fetches if it has not got it. Raises ToolError."""
        name = image or self._config.image
        for left in tuple(self.left):
            await self.remove(left)
            self.left.discard(left)
        async with self._starting:
            if self._session is None:
                connector = aiohttp.UnixConnector(str(self._config.socket), limit=0)
                self._session = aiohttp.ClientSession("http://daemon", connector=connector)
                await self._remove_orphans()
        shared = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{this_process()}-")) if gateway else None
        container = Container(self, f"sluice-{secrets.token_hex(16)}", shared)
        try:
            await self._begin(container, name, limits)
        except BaseException:  # a cancelled start leaves nothing either
            await container.close()
            raise
        return container

    async def _begin(self, container: "Container", image: str, limits: SandboxLimits) -> None:
        path = f"/containers/create?name={container.container_id}"
        described = self._described(image, limits, container.shared)
        status, made = await self.ask("POST", path, described)
        if status == 404:
            await self._pull(image)
            status, made = await self.ask("POST", path, described)
        if status != 201:
            raise ToolError(f"the daemon makes no container of {image!r}: {_message(made)}")
        held = f"{API}/containers/{container.container_id}/attach?stream=1&stdin=1"
        _, container.held = await _upgraded(self.socket, held, b"")
        status, said = await self.ask("POST", f"/containers/{container.container_id}/start")
        if status not in (204, 304):
            raise ToolError(f"the daemon starts no container of {image!r}: {_message(said)}")
        if not self._has_looked:
            self._has_looked = True
            await self._look_at_limits(container)

    async def _look_at_limits(self, container: "Container") -> None:
        """Say so where the daemon leaves out limits in silence, as Podman does that is an ordinary user's."""
        _, said = await self.ask("GET", f"/containers/{container.container_id}/json")
        held = said.get("HostConfig")
        if missing := [name for name in HELD if isinstance(held, Mapping) and not held.get(name)]:
            log.warning(
                "sandboxes_are_not_limited", daemon=str(self.socket), limits=missing,
                remedy="run the daemon as root, or on a host with control groups of version 2 alone",
            )  # fmt: skip

    async def remove(self, container_id: str) -> None:
        """Remove a container, which may be gone. Raises ToolError."""
        status, said = await self.ask("DELETE", f"/containers/{container_id}?force=1&v=1")
        if status not in (204, 404, 409):  # gone, or about to be
            raise ToolError(f"the daemon removes no container {container_id}: {_message(said)}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def socket(self) -> Path:
        return self._config.socket

    async def ask(self, method: str, path: str, body: JSON = None) -> tuple[int, Mapping[str, JSON]]:
        """Ask the daemon; return the status and what it says. Raises ToolError where it does not answer."""
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(REQUEST_TIMEOUT_S),
                self._session.request(method, API + path, json=body) as answer,
            ):
                said = await answer.text()
                return answer.status, _object(said.splitlines()[-1] if said else "{}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ToolError(f"the daemon at {self._config.socket} does not answer: {error!r}") from error

    async def _pull(self, name: str) -> None:
        image, _, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", "latest")
        status, said = await self.ask("POST", f"/images/create?fromImage={image}&tag={tag}")
        if status != 200 or "error" in said:
            raise ToolError(f"the daemon has no image {name!r}, and fetches none: {_message(said)}")

    def _described(self, image: str, limits: SandboxLimits, shared: Path | None) -> JSON:
        size = limits.disk_mb << 20
        host: dict[str, JSON] = {
            "NetworkMode": "none",
            "Memory": limits.memory_mb << 20,
            "MemorySwap": limits.memory_mb << 20,
            "PidsLimit": limits.processes,
            "CpuPeriod": PERIOD_US,
            "CpuQuota": round(limits.cpus * PERIOD_US),
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "AutoRemove": True,
            "OomScoreAdj": 1000,
            "Ulimits": [
                _ulimit("cpu", limits.cpu_s), _ulimit("fsize", size), _ulimit("core", 0),
                _ulimit("nofile", 1024),
            ],
            **({"StorageOpt": {"size": str(size)}} if self._config.disk_quota else {}),
            **({"Binds": [f"{shared}:{SHARED}:ro"]} if shared is not None else {}),
        }  # fmt: skip
        return {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c", LIVE, f"{self._config.life_s:.0f}"],
            "Cmd": [],
            "OpenStdin": True,
            "StdinOnce": True,
            "User": self._config.user or "",
            "WorkingDir": WORKSPACE,
            "Env": [f"HOME={WORKSPACE}"],
            "Labels": {OWNER: this_process()},
            "HostConfig": host,
        }

    async def _remove_orphans(self) -> None:
        """Remove containers and directories whose actor on this host has ended without closing them."""
        await asyncio.to_thread(_remove_directories)
        filters = json.dumps({"label": [OWNER]})
        assert self._session is not None
        try:
            async with self._session.get(
                f"{API}/containers/json", params={"all": "1", "filters": filters}
            ) as found:
                containers = await found.json()
        except (aiohttp.ClientError, OSError) as error:
            raise ToolError(f"the daemon at {self._config.socket} does not answer: {error!r}") from error
        for one in containers:
            if is_orphan(one["Labels"][OWNER]):
                log.info("orphaned_sandbox_removed", container=one["Id"][:12])
                await self.ask("DELETE", f"/containers/{one['Id']}?force=1&v=1")


class Container:
    """One container."""

    def __init__(self, backend: ContainerBackend, container_id: str, shared: Path | None) -> None:
        self.container_id = container_id
        self.shared = shared
        """Directory of this host that the container sees, if it is asked to listen."""
        self.held: asyncio.StreamWriter | None = None
        """Standard input of the container, which ends with it: the kernel closes it with this process."""
        self._backend = backend
        self._killed = 0
        """Processes that the kernel has killed for lack of memory, as far as is known."""

    async def run(self, command: Command) -> CommandResult:
        """Carry out a command. Raises ToolFailedError where the container has ended, else ToolError."""
        started, note = time.monotonic(), f"/tmp/.sluice-{secrets.token_hex(8)}"
        exec_id = await self._made(command, (BEGIN_EXEC, note, *command.words))
        path = f"{API}/exec/{exec_id}/start"
        end: CommandEnd | None = None
        async with _stream(self._backend.socket, path, command) as stream:
            try:
                end = await self._ended(stream, exec_id, command.timeout_s)
            finally:
                if end != "exited":
                    with suppress(ToolError):  # what is under way says more
                        await self._kill(note)
        status = await self._status(exec_id)
        if end == "exited" and status == KILLED and await self._lacked_memory():
            end = "memory"
        stdout, stderr = (bytes(stream.outputs[kind][: command.output_bytes]) for kind in (1, 2))
        return CommandResult(
            stdout=stdout, stderr=stderr, end=end, status=status, took_s=time.monotonic() - started
        )

    async def reach(self, gateway: str) -> tuple[str, socket.socket | None]:
        """Return an address of the container's loopback, and a socket of this host to which a relay in the
        container connects. Raises what `run` does, and ToolError where the image has no Python for that."""
        assert self.shared is not None
        with ExitStack() as opened:
            listening = opened.enter_context(socket.socket(socket.AF_UNIX))
            self.shared.chmod(0o711)  # else users of the image other than its root do not reach the socket
            listening.bind(str(self.shared / "gateway"))
            (self.shared / "gateway").chmod(0o666)
            listening.listen(BACKLOG)
            words = ("python3", "-c", RELAY, str(GATEWAY_PORT), f"{SHARED}/gateway")
            ran = await self.run(Command(words=words, timeout_s=REQUEST_TIMEOUT_S, directory="/"))
            if ran.status != 0:
                reason = ran.stderr.decode(errors="replace").strip()
                raise ToolError(f"nothing listens in the container, which needs python3 for it: {reason}")
            opened.pop_all()
        return NEAR, listening

    async def close(self) -> None:
        """Remove the container. Where the daemon does not, the log says so, and the next start asks again."""
        if self.shared is not None:
            await asyncio.to_thread(shutil.rmtree, self.shared, ignore_errors=True)
        try:
            await self._backend.remove(self.container_id)
        except ToolError as error:
            log.warning("container_is_not_removed", container=self.container_id, reason=str(error))
            self._backend.left.add(self.container_id)
        finally:
            if self.held is not None:
                self.held.close()

    async def _made(self, command: Command, script: Sequence[str]) -> str:
        described: JSON = {
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Cmd": ["/bin/sh", "-c", *script],
            "WorkingDir": command.directory,
            "Env": [f"{name}={value}" for name, value in command.variables.items()],
        }
        status, said = await self._backend.ask("POST", f"/containers/{self.container_id}/exec", described)
        if status != 201:
            raise ToolFailedError(f"the container has ended: {_message(said)}")
        return str(said["Id"])

    async def _ended(self, stream: "_Stream", exec_id: str, timeout_s: float) -> CommandEnd:
        """Wait until a command has ended or passed a limit. What it leaves in the background would keep the
        stream open: the daemon is asked, too."""
        until, wait_s = time.monotonic() + timeout_s, FIRST_LOOK_S
        while True:
            left_s = until - time.monotonic()
            if await stream.read(max(min(wait_s, left_s), 0.0)):
                return "output" if stream.is_over else "exited"
            if left_s <= 0:
                return "time"
            if not (await self._inspected(exec_id))["Running"]:
                await stream.read(LAST_OUTPUT_S)
                return "exited"
            wait_s = min(2 * wait_s, LONGEST_LOOK_S)

    async def _inspected(self, exec_id: str) -> Mapping[str, JSON]:
        status, said = await self._backend.ask("GET", f"/exec/{exec_id}/json")
        if status != 200:
            raise ToolFailedError(f"the container has ended: {_message(said)}")
        return said

    async def _status(self, exec_id: str) -> int:
        for _ in range(LOOKS):
            if not (said := await self._inspected(exec_id))["Running"]:
                code = said["ExitCode"]
                return code if isinstance(code, int) else KILLED
            await asyncio.sleep(FIRST_LOOK_S)
        return KILLED

    async def _lacked_memory(self) -> bool:
        """Return whether the kernel has killed further processes at the container's limit of memory."""
        words = ("/bin/sh", "-c", f"cat {OF_MEMORY} 2>/dev/null")
        ran = await self.run(Command(words=words, timeout_s=REQUEST_TIMEOUT_S, directory="/"))
        before, found = self._killed, re.search(rb"^oom_kill (\d+)$", ran.stdout, re.MULTILINE)
        self._killed = int(found[1]) if found else 0
        return self._killed > before

    async def _kill(self, note: str) -> None:
        """End a command with all of its session; what began a session of its own ends with the container."""
        described: JSON = {"Cmd": ["/bin/sh", "-c", END_EXEC, note]}
        status, made = await self._backend.ask("POST", f"/containers/{self.container_id}/exec", described)
        if status == 201:
            await self._backend.ask("POST", f"/exec/{made['Id']}/start", {"Detach": True})


class _Stream:
    """The connection that carries a command's input and output (`/exec/ID/start`, attached)."""

    def __init__(self, reader: asyncio.StreamReader, limit: int) -> None:
        self.outputs = {1: bytearray(), 2: bytearray()}
        self._limit = limit
        self._reading = asyncio.create_task(self._read(reader), name="output of a command")

    @property
    def is_over(self) -> bool:
        return any(len(output) > self._limit for output in self.outputs.values())

    async def read(self, timeout_s: float) -> bool:
        """Wait for what comes; return whether nothing more will. Raises ToolError for what is no output."""
        await asyncio.wait([self._reading], timeout=timeout_s)
        if self._reading.done():
            self._reading.result()
        return self._reading.done()

    async def close(self) -> None:
        await cancelled(self._reading)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while not self.is_over:
                kind, size = FRAME.unpack(await reader.readexactly(FRAME.size))
                self.outputs[kind] += await reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except KeyError as error:
            raise ToolError(f"the daemon sent output of kind {error}: only 1 and 2 are known") from error


@asynccontextmanager
async def _stream(socket: Path, path: str, command: Command) -> AsyncIterator[_Stream]:
    """Begin a command, and send its input while inside."""
    reader, writer = await _upgraded(socket, path, b'{"Detach": false, "Tty": false}')
    stream = _Stream(reader, command.output_bytes)
    writer.write(command.stdin)
    writer.write_eof()
    try:
        yield stream
    finally:
        await stream.close()
        writer.close()


async def _upgraded(
    socket: Path, path: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask the daemon for a connection that carries input and output. Raises ToolError, and ToolFailedError
    where it refuses. aiohttp leaves no connection to its user."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket))
        head = f"POST {path} HTTP/1.1\r\nHost: daemon\r\nContent-Type: application/json\r\n"
        upgrade = f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write((head + upgrade).encode() + body)
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            answer = await reader.readuntil(b"\r\n\r\n")
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise ToolError(f"the daemon at {socket} does not answer: {error!r}") from error
    if answer.split(b" ", 2)[1] not in (b"101", b"200"):
        writer.close()
        raise ToolFailedError(f"the daemon begins no command: {answer.splitlines()[0].decode()}")
    return reader, writer


def _remove_directories() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*-*"):
        if is_orphan(path.name.removeprefix(PREFIX).rpartition("-")[0]):
            shutil.rmtree(path, ignore_errors=True)


def _object(text: str) -> Mapping[str, JSON]:
    try:
        said = json.loads(text)
    except ValueError:
        return {"message": text}
    return said if isinstance(said, Mapping) else {"message": text}


def _message(said: Mapping[str, JSON]) -> str:
    return str(said.get("message") or said.get("error") or dict(said))


def _ulimit(name: str, value: int) -> JSON:
    return {"Name": name, "Soft": value, "Hard": value}
