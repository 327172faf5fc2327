"""Room for the sandboxes of all actors of a host, in a directory that these actors share. Each actor has a
file with what its sandboxes may use, and a lock on it that the kernel takes away when the actor ends, however
that comes about. Whoever asks next removes the file: its sandboxes count no more."""

import asyncio
import os
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from math import inf
from pathlib import Path

import structlog

from actors.episodes.errors import ToolError
from actors.settings.episode_sandboxes import HostBudgetConfig, SandboxLimits

log = structlog.get_logger()
USED = struct.Struct("<3Qd")
"""Sandboxes, the memory and disk that they may use, in MiB, and their processors."""
ASK_AGAIN_S = 0.1


class HostBudget:
    """Has sandboxes wait until the host has room for them."""

    def __init__(self, config: HostBudgetConfig) -> None:
        self._config = config
        self._most = [inf if one is None else one for one in config.amounts]
        self._directory = Path(tempfile.gettempdir(), f"sluice-sandboxes-{os.geteuid()}")
        self._used: tuple[float, ...] = (0, 0, 0, 0)
        self._own: int | None = None
        """Descriptor of this actor's file, once it has one."""

    @asynccontextmanager
    async def room(self, limits: SandboxLimits) -> AsyncIterator[None]:
        """Have room for a sandbox while inside. Raises ToolError where there is none for too long."""
        if self._most == [inf] * len(self._most):
            yield
            return
        amounts = (1, limits.memory_mb, limits.disk_mb, limits.cpus)
        try:
            async with asyncio.timeout(self._config.wait_s):
                while not self._takes(amounts):  # noqa: ASYNC110 - no event comes from other actors
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError as error:
            raise ToolError(f"this host had no room for a sandbox for {self._config.wait_s:g} s") from error
        except OSError as error:
            raise ToolError(f"{self._directory} cannot be shared with other actors: {error}") from error
        try:
            yield
        finally:
            self._note(used - one for used, one in zip(self._used, amounts, strict=True))

    def close(self) -> None:
        """Count no more."""
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def _takes(self, amounts: tuple[int, int, int, float]) -> bool:
        """Take room, if there is any and no other actor takes some right now. Raises OSError."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if self._directory.lstat().st_uid != os.geteuid():
            raise PermissionError("it is another user's")
        with (self._directory / "lock").open("w") as lock:
            if not _locked(lock.fileno()):
                return False
            together = map(sum, zip(amounts, *_noted_in(self._directory), strict=True))
            if any(one > most for one, most in zip(together, self._most, strict=True)):
                return False
            if self._own is None:
                self._own, _ = tempfile.mkstemp(prefix="actor-", dir=self._directory)
                flock(self._own, LOCK_EX)
            self._note(used + one for used, one in zip(self._used, amounts, strict=True))
        return True

    def _note(self, used: Iterator[float]) -> None:
        self._used = tuple(used)
        if self._own is not None:
            os.pwrite(self._own, USED.pack(*self._used), 0)


def _noted_in(directory: Path) -> Iterator[tuple[int, int, int, float]]:
    """Yield what each living actor uses, and remove the files of others."""
    for path in directory.glob("actor-*"):
        with path.open("rb") as file:
            if _locked(file.fileno()):
                path.unlink()
            elif len(noted := file.read(USED.size)) == USED.size:
                yield USED.unpack(noted)


def _locked(descriptor: int) -> bool:
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True
