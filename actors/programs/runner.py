"""Runs programs that others wrote, each kept from the actor, its host and other programs. A program is
bounded in time, output and what it uses, and ends with all that it has started."""

import asyncio
import json
import os
import pwd
import shutil
import site
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import structlog

from actors.programs.confinement import PRIVATE
from actors.programs.hidden import hidden_paths
from actors.programs.memory_groups import MemoryGroup, MemoryGroups
from actors.programs.output import Output, output_pipe
from actors.programs.request import ProgramRequest
from actors.sandboxes.as_json import to_json
from actors.sandboxes.server_process import LARGEST_PACKET, received, sealed_file, spawned
from actors.settings.agents import IsolationConfig
from bus.errors import ConfigError, SluiceError
from bus.waiting import cancelled

log = structlog.get_logger()
MEBIBYTE = 1 << 20
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
"""Longest time from the wish to end a program until nothing is left of it."""
EPISODES = "sluice-programs"
"""Name of the directory that holds those of programs: no program sees it."""
NOT_HELD = (
    "programs share processes, network and files with this actor's user: they could read its memory and "
    "files, write on a bus without credentials, and signal it"
)
Serve = Callable[[socket.socket], AbstractAsyncContextManager[None]]
"""Has the gateway listen at a socket while inside."""


class ProgramError(SluiceError):
    """A program could not be run to its end, by a fault of the host."""


class ProgramFailedError(ProgramError):
    """A program passed a limit, or was ended by what it did. After a timeout its cause is `TimeoutError`."""


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended by itself."""

    status: int
    """Exit status; negative for the signal that ended it."""
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to run once."""

    command: Sequence[str]
    variables: Mapping[str, str]
    directory: Path
    """Where the program works; it may write nothing else that outlasts it."""
    handed: bytes | None = None
    """Standard input of the program. It can be read once: what the program starts finds none of it."""
    readable: tuple[Path, ...] = ()
    """What the program may read although it lies in what is covered."""


class ProgramRunner:
    """Starts programs by a process of its own, which ends with it or by `close`. Raises ConfigError where the
    host allows no namespaces and they are required, or for a user who is not there."""

    def __init__(self, config: IsolationConfig, at_once: int = 1) -> None:
        """Take the number of programs `at_once`, which share the memory of this host."""
        self._config = config
        self._user = _user_of(config)
        self._base = Path(tempfile.gettempdir(), f"{EPISODES}-{os.geteuid()}").resolve()
        self._start()
        self.isolates = self._probe()
        """Whether programs get namespaces of their own."""
        self._groups = MemoryGroups.found(at_once) if self.isolates else None

    @property
    def gives_network(self) -> bool:
        """Return whether a program has a loopback of its own, at which nothing but the gateway listens."""
        return self.isolates and self._config.network == "gateway"

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Yield an empty directory for a program, which is removed afterwards with all that is in it."""
        self._base.mkdir(mode=0o711, exist_ok=True)
        if self._base.lstat().st_uid != os.geteuid():
            raise ProgramError(f"{self._base} is another user's: remove it, or set TMPDIR")
        directory = Path(tempfile.mkdtemp(prefix="episode-", dir=self._base))
        try:
            if self._user is not None:
                os.chown(directory, *self._user)
            yield directory
        finally:
            _remove(directory)

    async def run(
        self, program: Program, *, timeout_s: float | None, most_output_bytes: int | None,
        port: int | None = None, serve: Serve | None = None,
    ) -> ProgramEnd:  # fmt: skip
        """Run a program until it ends; `None` sets no bound.

        Raises `ProgramFailedError` for what the program did, `ProgramError` for a fault of the host, which
        may have had no memory left for its share of it, and OSError. However this ends, also by
        cancellation, no process that the program has started is left."""
        with self._groups.group() if self._groups is not None else nullcontext() as memory:
            try:
                ended = await self._run(program, timeout_s, most_output_bytes, port, serve, memory)
            except ProgramFailedError as error:
                _refuse_short_memory(memory, str(error))
                raise
            if ended.status:
                _refuse_short_memory(memory, f"status {ended.status}: {ended.output}")
            return ended

    async def _run(
        self, program: Program, timeout_s: float | None, most_output_bytes: int | None,
        port: int | None, serve: Serve | None, memory: MemoryGroup | None,
    ) -> ProgramEnd:  # fmt: skip
        async with AsyncExitStack() as opened:
            output, writing = await opened.enter_async_context(output_pipe(most_output_bytes))
            request = self._request(program, port if self.gives_network else None)
            report = opened.enter_context(await self._begun(request, program.handed, writing, opened, memory))
            ending = asyncio.create_task(
                _reported(report, serve if self.gives_network else None), name=f"run {program.command[0]}"
            )
            try:
                watched: set[asyncio.Future[Any]] = {ending, output.overflown}
                await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                was_over = ending.done()
            finally:
                await _ended(report, ending)
            await output.settle()
            if was_over:
                return self._end_of(program, ending.result(), output)
            if output.overflown.done():
                raise ProgramFailedError(
                    f"it wrote more than {most_output_bytes} bytes; the last: {output.tail}"
                )
            raise ProgramFailedError(
                f"it ran for {timeout_s:g} s; its last output: {output.tail}"
            ) from TimeoutError()

    def _end_of(self, program: Program, said: Mapping[str, Any], output: Output) -> ProgramEnd:
        if not said:  # in namespaces of its own a program does not reach who watches over it
            kind = ProgramError if self.isolates else ProgramFailedError
            raise kind("the process that watches over it has ended")
        if said["refused"]:
            raise ProgramError(f"cannot start {program.command[0]!r}: {said['refused']}")
        if said["over"]:
            raise ProgramFailedError(f"{said['over']}; its last output: {output.tail}")
        return ProgramEnd(said["status"], output.tail)

    async def close(self) -> None:
        """End the process that starts programs. Those that run end, too."""
        await asyncio.to_thread(self._end)

    def _start(self) -> None:
        self._server = spawned("actors.programs.server")
        self._end = weakref.finalize(self, self._server.end)

    def _request(self, program: Program, port: int | None) -> ProgramRequest:
        config = self._config
        covered = [path for path in (self._base, *config.hidden, *hidden_paths()) if path.exists()]
        written = {path.resolve() for path in config.writable}
        needed = (path for path in program.readable if _is_inside(path, (*map(Path, PRIVATE), *covered)))
        asked = (path for path in (*config.readable, *needed) if path.exists())
        readable = [path for path in asked if written.isdisjoint({path.resolve(), *path.resolve().parents})]
        return ProgramRequest(
            command=tuple(program.command),
            variables=self._variables(program),
            directory=str(program.directory),
            user=self._user,
            namespaces=self.isolates,
            port=port,
            readable=_texts(readable),
            writable=_texts(config.writable),
            covered=_texts(covered),
            cpu_s=config.cpu_s,
            memory_bytes=config.memory_mb * MEBIBYTE,
            processes=config.processes,
            file_bytes=config.file_mb * MEBIBYTE,
        )

    def _variables(self, program: Program) -> dict[str, str]:
        """Return the program's environment, in which home and temporary files are where it may write."""
        directory = str(program.directory)
        own = {
            "PYTHONUSERBASE": site.getuserbase(),
            "HOME": directory,
            "TMPDIR": "/tmp" if self.isolates else directory,
        }
        return {**own, **program.variables}

    async def _begun(
        self, request: ProgramRequest, handed: bytes | None, writing: int, opened: AsyncExitStack,
        memory: MemoryGroup | None,
    ) -> socket.socket:  # fmt: skip
        """Ask for the program; return the socket that tells its end. `writing` is closed here."""
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report.setblocking(False)
        with ExitStack() as sent:
            sent.callback(os.close, writing)
            sent.enter_context(theirs)
            sealed = sealed_file(to_json(request).encode(), sent)
            stdin = await _stdin(handed, sent, opened)
            joined = sent.enter_context(FileIO(os.devnull, "w") if memory is None else memory.group.joining())
            self._send([sealed, stdin, writing, theirs.fileno(), joined.fileno()])
        return report

    def _send(self, descriptors: list[int]) -> None:
        if self._server.process.poll() is not None:  # servers need next to nothing: one was killed
            self._end()
            self._start()
        socket.send_fds(self._server.control, [b"run"], descriptors)

    def _probe(self) -> bool:
        """Return whether this host allows namespaces; say so where it does not."""
        reason = _tried(self._send, self._user)
        if reason is None:
            return True
        if self._config.required:
            raise ConfigError(
                f"actors.environment.isolation.required: this host allows no namespaces ({reason}): let "
                "users make them, or run programs in a container of their own and leave it out"
            )
        log.warning("programs_are_not_isolated", reason=reason, consequence=NOT_HELD)
        return False


def _refuse_short_memory(memory: MemoryGroup | None, failure: str) -> None:
    """Raise ProgramError for a failure of a program that its host had no memory for."""
    if memory is not None and memory.was_short():
        raise ProgramError(f"this host had no memory left and killed a process of it; {failure}")


def _tried(send: Callable[[list[int]], None], user: tuple[int, int] | None) -> str | None:
    """Run a program that does nothing in namespaces; return why that failed."""
    report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    report.settimeout(START_TIMEOUT_S)
    request = ProgramRequest(
        command=("true",), variables={"PATH": os.defpath}, directory="/", user=user, port=1024
    )
    with report, ExitStack() as sent:
        sent.enter_context(theirs)
        null = os.open(os.devnull, os.O_RDWR)
        sent.callback(os.close, null)
        send([sealed_file(to_json(request).encode(), sent), null, null, theirs.fileno(), null])
        sent.close()
        try:
            while True:
                packet, descriptors, _, _ = socket.recv_fds(report, LARGEST_PACKET, 1)
                for descriptor in descriptors:
                    os.close(descriptor)
                if not descriptors:
                    break
        except TimeoutError:
            return f"no answer within {START_TIMEOUT_S:g} s"
    said = json.loads(packet) if packet else {"refused": "the process that starts programs has ended"}
    return said["refused"] or (f"status {said['status']}" if said["status"] else None)


class _Written(asyncio.Protocol):
    """Notes when a pipe has been written and closed."""

    is_over = False

    def connection_lost(self, _: Exception | None) -> None:
        self.is_over = True


async def _stdin(handed: bytes | None, sent: ExitStack, opened: AsyncExitStack) -> int:
    """Return the descriptor of what a program reads, which `sent` closes; `opened` ends the writing."""
    if handed is None:
        reading = os.open(os.devnull, os.O_RDONLY)
        sent.callback(os.close, reading)
        return reading
    reading, writing = os.pipe()  # no file: what was read is gone
    sent.callback(os.close, reading)
    transport, written = await asyncio.get_running_loop().connect_write_pipe(
        _Written, os.fdopen(writing, "wb", buffering=0)
    )
    opened.callback(lambda: None if written.is_over else transport.abort())
    transport.write(handed)
    transport.write_eof()
    return reading


async def _reported(report: socket.socket, serve: Serve | None) -> Mapping[str, Any]:
    """Have the gateway listen at the program's loopback, and return how the program ended."""
    async with AsyncExitStack() as serving:
        while True:
            packet, descriptors = await received(report)
            if not descriptors:
                found: Mapping[str, Any] = json.loads(packet or b"{}")
                return found
            listening = socket.socket(fileno=descriptors[0])
            if serve is None:
                listening.close()
            else:
                await serving.enter_async_context(serve(listening))


async def _ended(report: socket.socket, ending: "asyncio.Task[Mapping[str, Any]]") -> None:
    """Have a program end, and wait until nothing is left of it; what takes too long is told."""
    if ending.done():
        return
    report.shutdown(socket.SHUT_WR)
    await asyncio.wait([ending], timeout=END_TIMEOUT_S)
    if not ending.done():
        await cancelled(ending)
        log.warning("program_does_not_end", waited_s=END_TIMEOUT_S)


def _remove(directory: Path) -> None:
    """Remove a directory, whatever a program left in it. Python's own way comes to its limits of recursion
    and open files where directories are nested deeply."""
    with suppress(RecursionError):
        shutil.rmtree(directory, ignore_errors=True)
    if directory.is_dir() and not directory.is_symlink():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, directory], check=False, stderr=subprocess.DEVNULL)


def _user_of(config: IsolationConfig) -> tuple[int, int] | None:
    """Return the user and group that programs run as. Raises `ConfigError` for one that is not there."""
    name = config.user
    if name is None:
        return None
    if os.geteuid() != 0:
        raise ConfigError(
            f"isolation.user={name}: only an actor that runs as root may start programs as others"
        )
    try:
        found = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except KeyError as error:
        if name.isdecimal():
            return int(name), int(name)
        raise ConfigError(f"isolation.user={name}: this host has no such user") from error
    return found.pw_uid, found.pw_gid


def _is_inside(path: Path, places: Sequence[Path]) -> bool:
    return any(path.resolve().is_relative_to(place.resolve()) for place in places)


def _texts(paths: Sequence[Path]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(path.resolve()) for path in paths))
