"""The server of an engine: a child process of our own, or a URL that somebody else keeps alive. A child
process has a log file and never outlives this process."""

import asyncio
import json
import os
import platform
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

import psutil
import structlog

from actors.engines.sglang.client.client import SglangClient, UnreachableError
from actors.engines.sglang.server.launcher import UNKNOWN_SETTING
from actors.engines.sglang.server.settings import interpreter, server_environment, server_settings
from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError, EngineError
from bus.process.host_limits import MemoryKills
from bus.server.nats_server import free_port, listens
from bus.waiting import unless
from storage.disk.log_files import keep_newest, rotated

log = structlog.get_logger()
HOST = "127.0.0.1"
POLL_S = 0.25
LAUNCHER = Path(__file__).with_name("launcher.py")
TAIL_BYTES = 32 << 10
TAIL_LINES = 15
LOGS_KEPT = 64
"""Log files of engines that a host keeps: each actor process names its own, those of the dead go."""
PHASES = {
    "Init torch distributed begin": "preparing its devices",
    "Init parallel begin": "preparing its devices",
    "Load weight begin": "loading the model",
    "Load weight end": "allocating its cache",
    "Pre-Compile": "compiling kernels",
    "Compiling": "compiling kernels",
    "Capture ": "capturing CUDA graphs",
    "Capturing ": "capturing CUDA graphs",
    "Application startup complete": "answering its first request",
}
"""What a server does before it serves, by what its log says as it begins with that (0.5.17 to 0.5.23)."""
IN_MEMORY = re.compile(r"/dev/shm/(?:sglang_loads_|sgl_shm_|sem\.mp-)\S+$", re.MULTILINE)
GONE_POLL_S = 0.05
GONE_S = 30.0
"""The kernel may take so long to release a killed process's GPU memory."""
DYING_S = 1.0
"""Between a broken connection and the end of the process it led to."""
FAILED_LOOKS = 2
"""So many health checks in a row take a server for dead."""


def group_members(group: int) -> list[int]:
    return [process.pid for process in psutil.process_iter() if _is_member(process, group)]


def _is_member(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def files_in_memory(group: int) -> set[Path]:
    """Return the files in memory by which a server's processes speak to each other. Killed processes do not
    remove theirs."""
    found: set[str] = set()
    for pid in group_members(group):
        with suppress(OSError):  # the process has just ended
            found |= {*IN_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text())}
    return {Path(name) for name in found}


class ServerProcess:
    """One server and all of its processes: they are a process group, which ends as one. It also ends when
    this process dies, however that does."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, log_start: int) -> None:
        self._process = process
        self._log = log
        self._log_start = log_start
        self._memory_kills = MemoryKills()

    @classmethod
    async def start(
        cls, python: Path, settings: Mapping[str, object], environment: Mapping[str, str], log: Path
    ) -> Self:
        """Start a server; it writes to the end of `log`. Raises `ConfigError` if it cannot be executed."""
        log.parent.mkdir(parents=True, exist_ok=True)
        keep_newest(log.parent, f"engine-*-{platform.node()}-*.log*", LOGS_KEPT)
        with log.open("ab") as output:
            start = output.tell()
            try:
                process = await asyncio.create_subprocess_exec(
                    str(python),
                    str(LAUNCHER),
                    json.dumps(settings),
                    stdin=asyncio.subprocess.PIPE,  # closes with this process, whereupon they all end
                    stdout=output,
                    stderr=output,
                    env=dict(environment),
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"cannot execute {python}: {error.strerror}") from error
        return cls(process, log, start)

    @property
    def pid(self) -> int:
        """Id of the server's first process, and of its process group."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Return the process's exit status, negative for a signal; None as long as it runs."""
        return self._process.returncode

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> None:
        await self._process.wait()

    async def keep_log_short(self) -> None:
        """Continue a log that has become long in an empty file."""
        if await asyncio.to_thread(rotated, self._log):
            self._log_start = 0

    async def kill(self) -> None:
        """End all processes of the server at once: no farewell would be worth the time. Returns when
        they are gone, since the next server needs the GPU memory that they held."""
        files = files_in_memory(self.pid)
        with suppress(ProcessLookupError):  # all processes have ended by themselves
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        deadline = time.monotonic() + GONE_S
        while alive := group_members(self.pid):
            if time.monotonic() > deadline:
                log.warning("sglang_processes_live_on", pids=alive, waited_s=GONE_S)
                return
            await asyncio.sleep(GONE_POLL_S)
        for file in files:
            file.unlink(missing_ok=True)

    def failure(self) -> EngineError | ConfigError:
        """Return why the server ended, with the last lines of its log."""
        lines = self._tail()
        if self._process.returncode == UNKNOWN_SETTING and lines:
            return ConfigError(f"actors.engine.server: {lines[-1]}")
        said = "\n".join(lines[-TAIL_LINES:]) or "(nothing)"
        return EngineError(f"the SGLang server ended with {self.ending}. The end of {self._log}:\n{said}")

    def listens(self, port: int) -> bool:
        """Return whether one of its processes accepts connections at a port."""
        return any(listens(pid, port) for pid in group_members(self.pid))

    @property
    def ending(self) -> str:
        status = self._process.returncode
        assert status is not None, "it has ended"
        return self._memory_kills.ending(status, "lower mem_fraction_static in actors.engine.server")

    def tail(self) -> str:
        return "\n".join(self._tail()[-TAIL_LINES:])

    def phase(self) -> str:
        """Return what the server does before it serves, by the last line of its log that tells."""
        found = (words for line in reversed(self._tail()) for sign, words in PHASES.items() if sign in line)
        return next(found, "loading its libraries")

    def _tail(self) -> list[str]:
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()


class Server(Protocol):
    """The server of an engine, or the two of a pair."""

    @property
    def phase(self) -> str:
        """Return in words what it does before it serves."""

    async def start(self) -> SglangClient:
        """Start the server or find it; who asks closes the client."""

    async def until_ready(self, client: SglangClient) -> None:
        """Return when the server serves. Raises EngineError or ConfigError when it does not."""

    async def ended(self, *, within_s: float) -> str:
        """Wait so long; return why the server ended, or an empty string when it has not."""

    async def kill(self) -> None:
        """End the server, whatever state it is in, unless it is not ours."""


class OwnServer:
    """A server that this process starts."""

    def __init__(self, config: SglangEngineConfig, model: Path, log_file: Path, first_gpu: int) -> None:
        self.process: ServerProcess | None = None
        self.phase = "beginning"
        self._config = config
        self._model = model
        self._log_file = log_file
        self._first_gpu = first_gpu
        self._port = 0

    async def start(self) -> SglangClient:
        """Start a process, with arbitrary weights."""
        self._port = port = free_port(HOST)
        settings = server_settings(
            self._config, self._model,
            host=HOST, port=port, first_gpu=self._first_gpu, ranks_port=free_port(HOST),
        )  # fmt: skip
        python = interpreter(self._config)
        environment = server_environment(self._config, settings, python)
        self.process = await ServerProcess.start(python, settings, environment, self._log_file)
        return SglangClient.connect(f"http://{HOST}:{port}")

    async def until_ready(self, client: SglangClient) -> None:
        """Return when the server has generated a token; it is killed when it does not in time. Another that
        took its port meanwhile does not count: ours ends when it cannot listen there."""
        assert self.process is not None, "the process is started first"
        deadline = time.monotonic() + self._config.start_timeout_s
        while not self.process.ended:
            is_there = await asyncio.to_thread(self.process.listens, self._port)
            if is_there and await client.healthy(self._config.health_timeout_s):
                return
            self.phase = await asyncio.to_thread(self.process.phase)
            if time.monotonic() > deadline:
                await self.process.kill()
                raise EngineError(
                    f"the SGLang server did not serve within actors.engine.start_timeout_s="
                    f"{self._config.start_timeout_s:g}. The end of {self._log_file}:\n{self.process.tail()}"
                )
            await self.ended(within_s=POLL_S)
        failure = self.process.failure()
        await self.process.kill()  # children of the process may live on
        raise failure

    async def ended(self, *, within_s: float) -> str:
        process = self.process
        assert process is not None, "the process is started first"
        try:
            async with asyncio.timeout(within_s):
                await process.wait()
        except TimeoutError:
            await process.keep_log_short()
            return ""
        return f"it ended with {process.ending}: see {self._log_file}"

    async def kill(self) -> None:
        if self.process is not None:
            await self.process.kill()


class AttachedServer:
    """A server that runs already: it is waited for, watched, and brought to our weights."""

    def __init__(self, config: SglangEngineConfig) -> None:
        self.phase = f"waiting for {config.url}"
        self._config = config

    async def start(self) -> SglangClient:
        assert self._config.url is not None, "the engine makes one for a URL only"
        return SglangClient.connect(self._config.url)

    async def until_ready(self, client: SglangClient) -> None:
        """Return when the server answers; it may be starting, or starting again. An actor that was killed in
        an update left that open, so that no other could begin, and the server paused, so that it would
        generate nothing."""
        deadline = time.monotonic() + self._config.start_timeout_s
        waiting = False
        while True:
            try:
                await client.weight_version()
            except UnreachableError as error:
                if time.monotonic() > deadline:
                    raise
                if not waiting:
                    log.warning("sglang_waited_for", url=client.url, reason=str(error))
                waiting = True
                await asyncio.sleep(POLL_S)
            else:
                await client.end_open_update()
                await client.resume()
                return

    async def ended(self, *, within_s: float) -> str:
        """Wait; only health checks can tell."""
        await asyncio.sleep(within_s)
        return ""

    async def kill(self) -> None:
        """Leave the server alone."""


class HealthChecks:
    """Watches a server for as long as it lives."""

    def __init__(
        self, config: SglangEngineConfig, server: Server, connected: Callable[[], SglangClient], *,
        busy: Callable[[], bool], well: Callable[[], None],
    ) -> None:  # fmt: skip
        """`busy` says whether the server cannot generate now; `well` is called when it has generated."""
        self.looking = asyncio.Lock()
        """Held while the server's health is looked at, which generates a token."""
        self._config = config
        self._server = server
        self._connected = connected
        self._busy = busy
        self._well = well
        self._doubted = asyncio.Event()

    def doubt(self) -> None:
        self._doubted.set()

    async def until_it_fails(self) -> str:
        failed = 0
        while failed < FAILED_LOOKS:
            if reason := await self._ended_or_doubted():
                return reason
            async with self.looking:
                if self._busy():
                    continue
                healthy = await self._connected().healthy(self._config.health_timeout_s)
            if healthy:
                failed = 0
                self._well()
            elif not self._busy():
                failed += 1
        return f"the server did not generate within {self._config.health_timeout_s:g} s, {FAILED_LOOKS} times"

    async def _ended_or_doubted(self) -> str:
        """Wait for the next look at the server: why it ended, or an empty string."""
        ended = await unless(self._doubted, self._server.ended(within_s=self._config.health_every_s))
        if ended is not None:
            return ended
        self._doubted.clear()
        return await self._server.ended(within_s=DYING_S)
