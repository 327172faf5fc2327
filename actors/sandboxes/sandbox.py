"""Python programs of a model in processes without network, files and privileges, within limits.

sandbox = Sandbox(Limits())
ran = await sandbox.run("print(6 * 7)")     # ran.stdout == "42\\n"
"""

import asyncio
import json
import os
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

from actors.episodes.errors import ToolError
from actors.sandboxes.as_json import to_json
from actors.sandboxes.limits import Limits
from actors.sandboxes.server_process import sealed_file, started_server
from actors.settings.tools import SandboxConfig
from bus.errors import ConfigError
from bus.process.plugins import refuse_of_record

GRACE_S = 10.0
"""Longest time after a program's own limit until its end is reported."""
CHUNK_BYTES = 1 << 16
MEGABYTE = 1 << 20
ProgramEnd = Literal["exited", "time", "cpu", "output", "stopped"]
"""How a program ended: by itself, at its limit of time, processor time or output, or with what it served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a program did."""

    stdout: str
    stderr: str
    end: ProgramEnd
    status: int
    """Exit status; negative for the signal that ended it."""
    took_s: float


class Sandbox:
    """Runs programs, `at_once` at a time; further ones wait. Its process ends with it, or by `close`. Raises
    ConfigError where the host allows no sandbox: there is no weaker one."""

    def __init__(self, limits: Limits, *, at_once: int = 4, output_bytes: int = 1 << 16) -> None:
        self._limits = limits
        self._output_bytes = output_bytes
        self._slots = asyncio.Semaphore(at_once)
        self._starting = asyncio.Lock()
        self._start()

    def _start(self) -> None:
        self._server = started_server("actors.sandboxes.server", to_json(self._limits))
        self._end = weakref.finalize(self, self._server.end)

    async def run(self, code: str, stdin: str = "", *, output_bytes: int | None = None) -> Ran:
        """Run a program. Raises ToolError where the sandbox, not the program, failed. `output_bytes` stands
        for the sandbox's own limit."""
        limit = self._output_bytes if output_bytes is None else output_bytes
        async with self._slots:
            return await self._run(code, stdin, limit, self._limits)

    async def run_joined(
        self, code: str, other: str, stdin: str = "", *, wall_s: float | None = None
    ) -> tuple[Ran, Ran]:
        """Run two programs apart from each other, whose descriptors 3 are a socket between them. They take
        one place. The other is stopped when the first has ended. Raises ToolError where the sandbox failed
        for one of them. The first alone reads `stdin`. `wall_s` is for each, instead of the sandbox's own
        limit, and may all be processor time."""
        limits = self._limits
        if wall_s is not None:
            limits = replace(limits, wall_s=wall_s, cpu_s=max(limits.cpu_s, ceil(wall_s)))
        async with self._slots:
            here, there = socket.socketpair()
            over = asyncio.Event()

            async def first() -> Ran:
                try:
                    return await self._run(code, stdin, self._output_bytes, limits, peer=here)
                finally:
                    over.set()

            with here, there:
                second = self._run(other, "", self._output_bytes, limits, peer=there, stop=over)
                ran, of_other = await asyncio.gather(first(), second, return_exceptions=True)
        for outcome in (ran, of_other):
            if isinstance(outcome, BaseException):
                raise outcome
        return cast(tuple[Ran, Ran], (ran, of_other))

    async def close(self) -> None:
        """End the sandbox's process. Programs that run end at their limit of time at the latest."""
        await asyncio.to_thread(self._end)

    async def _ensure_server(self) -> None:
        """Start the sandbox's process again if something ended it."""
        async with self._starting:
            if self._server.process.poll() is not None:
                await asyncio.to_thread(self._end)
                await asyncio.to_thread(self._start)

    async def _run(
        self, code: str, stdin: str, limit: int, limits: Limits, *,
        peer: socket.socket | None = None, stop: asyncio.Event | None = None,
    ) -> Ran:  # fmt: skip
        """Run a program, until `stop` at the latest; `peer` is given to it and closed here."""
        with peer or nullcontext():
            try:
                await self._ensure_server()
                with ExitStack() as ours:
                    report, streams = self._started_program(code, stdin, limits, peer, ours)
                    async with asyncio.timeout(limits.wall_s + GRACE_S):
                        return await _outcome(report, streams, limit, stop)
            except (OSError, ConfigError, TimeoutError) as error:
                raise ToolError(f"the sandbox failed: {error!r}") from error

    def _started_program(
        self, code: str, stdin: str, limits: Limits, peer: socket.socket | None, ours: ExitStack
    ) -> tuple[socket.socket, list[BinaryIO]]:
        """Start a program; return the socket that tells its end, and its output and errors, of `ours`."""
        report, theirs = socket.socketpair()
        ours.enter_context(report)
        with ExitStack() as sent:
            sent.enter_context(theirs)
            out, err = _pipe(ours, sent), _pipe(ours, sent)
            code_file, stdin_file = (
                sealed_file(text.encode("utf-8", "surrogatepass"), sent) for text in (code, stdin)
            )
            descriptors = [code_file, stdin_file, out.write_end, err.write_end, theirs.fileno()]
            if peer is not None:
                descriptors.append(sent.enter_context(peer).fileno())
            times = json.dumps({"wall_s": limits.wall_s, "cpu_s": limits.cpu_s}).encode()
            socket.send_fds(self._server.control, [times], descriptors)
        return report, [out.read_end, err.read_end]


async def _outcome(
    report: socket.socket, streams: Sequence[BinaryIO], limit: int, stop: asyncio.Event | None
) -> Ran:
    """Read what a program writes and how it ended; too much output ends it, and so does `stop`."""
    reader, writer = await asyncio.open_connection(sock=report)
    stopping = None if stop is None else asyncio.create_task(_after(stop, writer.write_eof))
    try:
        reading = [_read(stream, limit, writer.write_eof) for stream in streams]
        out, err, packet = await asyncio.gather(*reading, reader.read())
    finally:
        writer.close()  # a program that still runs is killed
        if stopping is not None:
            stopping.cancel()
    if not packet:
        raise ToolError("the sandbox failed: the process that watches a program was ended")
    outcome = json.loads(packet)
    if "broken" in outcome:
        raise ToolError(f"the sandbox failed: {outcome['broken']}")
    if outcome["end"] == "killed":
        raise ToolError("a program was killed by its host, which may be short of memory")
    return Ran(
        stdout=decoded(out[:limit]),
        stderr=decoded(err[:limit]),
        end="output" if max(len(out), len(err)) > limit else outcome["end"],
        status=outcome["status"],
        took_s=outcome["took_s"],
    )


async def _after(event: asyncio.Event, act: Callable[[], None]) -> None:
    await event.wait()
    act()


class _Pipe(NamedTuple):
    read_end: BinaryIO
    write_end: int


def _pipe(ours: ExitStack, sent: ExitStack) -> _Pipe:
    read_end, write_end = os.pipe()
    sent.callback(os.close, write_end)
    return _Pipe(ours.enter_context(os.fdopen(read_end, "rb", buffering=0)), write_end)


async def _read(stream: BinaryIO, limit: int, stop: Callable[[], None]) -> bytes:
    """Return all that comes, or, after calling `stop`, somewhat more than `limit` bytes of it."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, stream)
    data = bytearray()
    try:
        while len(data) <= limit and (chunk := await reader.read(CHUNK_BYTES)):
            data += chunk
    finally:
        transport.close()
    if len(data) > limit:
        stop()
    return bytes(data)


def configured_sandbox(config: SandboxConfig, *, output_bytes: int = 1 << 16) -> Sandbox:
    """Start a sandbox. Raises ConfigError where the host allows none, or a package may not be loaded."""
    for name in config.packages:  # importing a package runs code outside of the sandbox's limits
        refuse_of_record(f"the package {name!r}", name)
    limits = Limits(
        wall_s=config.wall_s,
        cpu_s=config.cpu_s,
        memory_bytes=config.memory_mb * MEGABYTE,
        processes=config.processes,
        file_bytes=config.file_mb * MEGABYTE,
        preload=config.packages,
        package_directories=package_directories() if config.packages else (),
    )
    return Sandbox(limits, at_once=config.at_once, output_bytes=output_bytes)


def package_directories() -> tuple[str, ...]:
    """Return the directories of installed packages that this process imports from."""
    names = ("site-packages", "dist-packages")
    return tuple(path for path in sys.path if Path(path).name in names and Path(path).is_dir())


def decoded(data: bytes) -> str:
    """Return bytes as text; what is no UTF-8 becomes U+FFFD, and NUL goes, which no template expects."""
    return data.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
