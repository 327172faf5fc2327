"""A SGLang server as a child process, with a log file, that never outlives this process."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil
import structlog

from actors.engines.sglang.launcher import UNKNOWN_SETTING
from bus.errors import ConfigError, EngineError

log = structlog.get_logger()
LAUNCHER = Path(__file__).with_name("launcher.py")
TAIL_BYTES = 32 << 10
TAIL_LINES = 15
POLL_S = 0.05
GONE_S = 30.0
"""The kernel may take so long to release a killed process's GPU memory."""


def group_members(group: int) -> list[int]:
    """The processes of a process group that have not ended."""
    return [process.pid for process in psutil.process_iter() if _is_member(process, group)]


def _is_member(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


class ServerProcess:
    """One server and all of its processes: they are a process group, which ends as one.

    It also ends when this process dies, however that does."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, log_start: int) -> None:
        self._process = process
        self._log = log
        self._log_start = log_start

    @classmethod
    async def start(
        cls, python: Path, settings: Mapping[str, object], environment: Mapping[str, str], log: Path
    ) -> Self:
        """Start a server; it writes to the end of `log`. Raises `ConfigError` if it cannot be executed."""
        log.parent.mkdir(parents=True, exist_ok=True)
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
        """Its exit status, negative for a signal; None as long as it runs."""
        return self._process.returncode

    @property
    def ended(self) -> bool:
        """Whether its first process has ended, without which it does not serve."""
        return self._process.returncode is not None

    async def wait(self) -> None:
        """Return when it has ended."""
        await self._process.wait()

    async def kill(self) -> None:
        """End all of its processes at once: it keeps nothing that would be worth a farewell.

        Returns when they are gone, since the next server needs the GPU memory that they held."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        deadline = time.monotonic() + GONE_S
        while alive := group_members(self.pid):
            if time.monotonic() > deadline:
                log.warning("sglang_processes_live_on", pids=alive, waited_s=GONE_S)
                return
            await asyncio.sleep(POLL_S)

    def failure(self) -> EngineError | ConfigError:
        """Why it ended: with the last lines of its log."""
        lines = self._tail()
        if self._process.returncode == UNKNOWN_SETTING and lines:
            return ConfigError(f"actors.engine.server: {lines[-1]}")
        said = "\n".join(lines[-TAIL_LINES:]) or "(nothing)"
        status = self._process.returncode
        return EngineError(f"the SGLang server ended with status {status}. The end of {self._log}:\n{said}")

    def tail(self) -> str:
        """The last lines that it wrote."""
        return "\n".join(self._tail()[-TAIL_LINES:])

    def _tail(self) -> list[str]:
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()
