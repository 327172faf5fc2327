"""Sandboxes in namespaces of this host: its programs read-only, without its data, network and processes."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from actors.episode_sandboxes.base import GATEWAY_PORT, NEAR, Command, CommandResult
from actors.episode_sandboxes.cpu_groups import CpuGroups
from actors.episode_sandboxes.guest import PROGRAMS
from actors.episode_sandboxes.guest_request import CommandRequest, GuestLimits, GuestSettings
from actors.episodes.errors import ToolError
from actors.programs.hidden import hidden_paths
from actors.sandboxes.as_json import to_json
from actors.sandboxes.control_groups import ControlGroup
from actors.sandboxes.sandbox import package_directories
from actors.sandboxes.server_process import received, sealed_file, started_server
from actors.settings.episode_sandboxes import NamespaceSandboxes, SandboxLimits
from bus.errors import ConfigError
from bus.process.plugins import refuse_of_record

START_TIMEOUT_S = 30.0
GRACE_S = 10.0
"""Longest time after a command's own limit until its end is reported."""
LAST_OUTPUT_S = 0.2
"""Time for output that comes after a command's end, where it has left something in the background."""
LARGEST_REPORT = 4096


class NamespaceBackend:
    """Starts sandboxes by a process of its own, which ends with it or by `close`."""

    def __init__(self, settings: GuestSettings) -> None:
        """Raises ConfigError where the host allows no namespaces."""
        self._settings = settings
        self._starting = asyncio.Lock()
        self._start()
        self._groups = CpuGroups.found()

    @classmethod
    def from_config(cls, config: NamespaceSandboxes) -> Self:
        """Build. Raises ConfigError where the host allows no namespaces, or a path is not there."""
        for path in config.readable:
            refuse_of_record(f"the sandbox's readable {path}", str(path))
        if missing := [path for path in config.readable if not path.exists()]:
            raise ConfigError(f"a sandbox's readable={missing[0]}: this host has no such file")
        variables = {
            "PATH": f"{Path(sys.prefix, 'bin')}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/workspace", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "MPLBACKEND": "Agg", "USER": "sandbox",
        }  # fmt: skip
        shown = (*package_directories(), *(str(path.resolve()) for path in config.readable))
        return cls(
            GuestSettings(
                shown=shown, hidden=tuple(_hidden_below(shown)), variables=variables, links=config.links
            )
        )

    def _start(self) -> None:
        self._server = started_server("actors.episode_sandboxes.guest", to_json(self._settings))
        self._end = weakref.finalize(self, self._server.end)

    async def start(
        self, image: str | None, limits: SandboxLimits, gateway: str | None = None
    ) -> "NamespaceSandbox":
        if image is not None:
            raise ToolError(
                f"image={image!r}: sandboxes in namespaces have this host's programs, and no image"
            )
        async with self._starting:
            if self._server.process.poll() is not None:  # servers need next to nothing: one was killed
                await asyncio.to_thread(self._end)
                await asyncio.to_thread(self._start)
        may_use = GuestLimits(
            cpu_s=limits.cpu_s, memory_bytes=limits.memory_mb << 20, processes=limits.processes,
            disk_bytes=limits.disk_mb << 20,
        )  # fmt: skip
        group = self._groups.made(limits.cpus) if self._groups is not None else None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        sandbox = NamespaceSandbox(ours, group)
        try:
            with theirs, group.joining() if group is not None else nullcontext() as joining:
                sent = [theirs.fileno(), *([joining.fileno()] if joining is not None else ())]
                socket.send_fds(self._server.control, [json.dumps(asdict(may_use)).encode()], sent)
            async with asyncio.timeout(START_TIMEOUT_S):
                said = json.loads(await asyncio.get_running_loop().sock_recv(ours, LARGEST_REPORT) or b"{}")
        except BaseException as error:  # a cancelled start leaves nothing either
            ours.close()
            if group is not None:
                group.remove()
            if isinstance(error, OSError | TimeoutError):
                raise ToolError(f"no sandbox was started: {error!r}") from error
            raise
        if "ready" not in said:
            await sandbox.close()
            raise ToolError(f"no sandbox was started: {said.get('refused', 'its process ended')}")
        return sandbox

    async def close(self) -> None:
        await asyncio.to_thread(self._end)


def _hidden_below(shown: Sequence[str]) -> list[str]:
    """Return what of that which sandboxes see is hidden, but for what Python needs."""
    needed = [Path(one).resolve() for one in (*package_directories(), sys.prefix, sys.base_prefix)]
    seen = [*needed, *map(Path, (*PROGRAMS, *shown))]
    return [
        str(path)
        for path in sorted({path.resolve() for path in hidden_paths()})
        if any(path.is_relative_to(one) for one in seen)
        and not any(one.is_relative_to(path) for one in needed)
    ]


class NamespaceSandbox:
    """One sandbox, which lives until its socket is closed."""

    def __init__(self, control: socket.socket, group: ControlGroup | None) -> None:
        self._control = control
        self._group = group

    async def run(self, command: Command) -> CommandResult:
        """Carry out a command. Raises ToolError where the sandbox has ended: nothing in it can end it.
        Commands may end the process that watches them, as `kill -9 -1` does: that reads as their own end."""
        request = CommandRequest(
            words=tuple(command.words), variables=dict(command.variables), directory=command.directory,
            timeout_s=command.timeout_s,
        )  # fmt: skip
        started = time.monotonic()
        try:
            with ExitStack() as ours:
                report, outputs = await self._begun(request, command, ours)
                async with asyncio.timeout(command.timeout_s + GRACE_S):
                    packet = await asyncio.get_running_loop().sock_recv(report, LARGEST_REPORT)
                await asyncio.wait([output.ended for output in outputs], timeout=LAST_OUTPUT_S)
        except (OSError, TimeoutError) as error:
            raise ToolError(f"the sandbox failed: {error!r}") from error
        if not packet and await self._has_ended():
            raise ToolError("the sandbox failed: it has ended")
        killed: dict[str, Any] = {"end": "exited", "status": -signal.SIGKILL}
        said, limit = json.loads(packet) if packet else killed, command.output_bytes
        return CommandResult(
            stdout=bytes(outputs[0].data[:limit]),
            stderr=bytes(outputs[1].data[:limit]),
            end="output" if any(output.is_over for output in outputs) else said["end"],
            status=said["status"],
            took_s=said.get("took_s", time.monotonic() - started),
        )

    async def reach(self, gateway: str) -> tuple[str, socket.socket | None]:
        """Return an address of the sandbox's loopback, and the socket that listens there. Raises
        ToolError."""
        return NEAR, await self.listen(GATEWAY_PORT)

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens at a port of the sandbox's loopback. Raises ToolError."""
        try:
            self._control.send(str(port).encode())
            async with asyncio.timeout(GRACE_S):
                packet, descriptors = await received(self._control)
        except (OSError, TimeoutError) as error:
            raise ToolError(f"the sandbox failed: {error!r}") from error
        if not descriptors:
            raise ToolError(f"nothing listens at port {port} of the sandbox: {packet.decode()}")
        listening = socket.socket(fileno=descriptors[0])
        listening.setblocking(False)
        return listening

    async def _has_ended(self) -> bool:
        """Return whether nothing is left of the sandbox, which is known soon after its first process ends."""
        try:
            async with asyncio.timeout(LAST_OUTPUT_S):
                return not await asyncio.get_running_loop().sock_recv(self._control, LARGEST_REPORT)
        except TimeoutError:
            return False
        except OSError:
            return True

    async def close(self) -> None:
        try:
            self._control.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(GRACE_S):
                while await asyncio.get_running_loop().sock_recv(self._control, LARGEST_REPORT):
                    pass
        except (OSError, TimeoutError):
            pass  # closing the socket ends it all the same
        finally:
            self._control.close()
            if self._group is not None:
                self._group.remove()

    async def _begun(
        self, request: CommandRequest, command: Command, ours: ExitStack
    ) -> tuple[socket.socket, list["_Output"]]:
        """Ask for a command; return the socket that tells its end, and its output and errors, of `ours`."""
        report, theirs = socket.socketpair()
        ours.enter_context(report)
        report.setblocking(False)
        with ExitStack() as sent:
            sent.enter_context(theirs)
            files = [sealed_file(data, sent) for data in (to_json(request).encode(), command.stdin)]
            outputs, ends = [], []
            for _ in range(2):
                read_end, write_end = os.pipe()
                sent.callback(os.close, write_end)
                ends.append(write_end)
                outputs.append(await _read(read_end, command.output_bytes, report, ours))
            socket.send_fds(self._control, [b"run"], [*files, *ends, theirs.fileno()])
        return report, outputs


class _Output(asyncio.Protocol):
    """Keeps what a command writes, up to a limit at which the command is stopped."""

    def __init__(self, limit: int, stop: Callable[[], None]) -> None:
        self.data = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._stop = stop

    @property
    def is_over(self) -> bool:
        return len(self.data) > self._limit

    def data_received(self, data: bytes) -> None:
        if self.is_over:
            return
        self.data += data
        if self.is_over:
            self._stop()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def _read(read_end: int, limit: int, report: socket.socket, ours: ExitStack) -> _Output:
    transport, output = await asyncio.get_running_loop().connect_read_pipe(
        lambda: _Output(limit, lambda: report.shutdown(socket.SHUT_WR)),
        os.fdopen(read_end, "rb", buffering=0),
    )
    ours.callback(transport.close)
    return output
