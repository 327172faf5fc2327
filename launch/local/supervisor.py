"""The supervisor of a run's child processes on one machine: it starts, watches, restarts and stops them."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import psutil
import structlog

from bus.errors import ConfigError, LostDataError, SluiceError
from bus.process.child_process import tied_to_parent
from bus.process.host_limits import MemoryKills
from launch.process.runtime import FINAL, LOST_DATA, SUPERVISOR, TEMPORARY, last_words
from launch.run_view.monitor import PartEnding
from launch.settings.run_config import SupervisionConfig
from storage.disk.file_errors import lack_of_room
from storage.disk.log_files import rotated

log = structlog.get_logger()
POLL_S = 0.05
LOG_CHECK_S = 10.0
"""Seconds between two looks at the sizes of log files."""
SAY_AFTER_S = 3.0
"""Time after which it is said which part a stop waits for."""
ROOM_PERIOD_S = 1.0
"""Seconds between two looks at a full disk."""
MOST_DOUBLINGS = 30
"""Doublings of the pause before a restart, whose number has no bound, after which it is longest anyway."""


@dataclass
class Part:
    """One supervised process."""

    name: str
    command: Sequence[str]
    drain_s: float = 60.0
    """Longest time that the part may take to end after SIGTERM."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the part has besides those of this process."""
    serves: bool = False
    """Says whether others may need it until they have ended, as they need storage and the bus."""
    ends_run: bool = False
    """Says whether the run is over when it ends with status 0."""
    may_end: Callable[[], bool] = lambda: False
    """Tells whether a part has done its work when it ends with status 0, and the run goes on without it."""
    smaller: str = ""
    """Settings by which a part takes less memory, said when the kernel has killed it for lack of memory."""
    memory_kills: MemoryKills = field(default_factory=MemoryKills)
    """What the kernel has killed for lack of memory since the latest process began."""
    process: asyncio.subprocess.Process | None = None
    started: list[float] = field(default_factory=list)
    """Monotonic time of each start."""
    failed: list[float] = field(default_factory=list)
    """Monotonic time of each end within the window that was no `TEMPORARY` one."""
    log_start: int = 0
    """Position in its log file where the output of the latest process begins."""
    ending: PartEnding | None = None
    """Ending of the latest process of this part that has ended."""

    @property
    def running(self) -> asyncio.subprocess.Process | None:
        return self.process if self.process is not None and self.process.returncode is None else None


class Supervisor:
    """Keeps the parts of a run alive until one of them ends the run, one fails for good, or `stop` comes.
    `inherited` are file descriptors that every part holds open as long as it lives, such as a lock."""

    def __init__(
        self, logs: Path, *, policy: SupervisionConfig | None = None, inherited: Sequence[int] = ()
    ) -> None:
        self.parts: list[Part] = []
        self._logs = logs
        self._policy = policy or SupervisionConfig()
        self._inherited = tuple(inherited)
        self._longest_drain_s = inf

    @property
    def restarts(self) -> int:
        return sum(len(part.started) - 1 for part in self.parts)

    async def start(self, part: Part, *, ready: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Start `part`; from now on it is watched and, at the end, stopped. Return when it is `ready`. One
        that is killed before that is started again. Raises what `watch` does if it ends by itself."""
        self.parts.append(part)
        await self._spawn(part)
        while ready is not None and not await ready():
            status = part.process.returncode if part.process is not None else None
            if status is not None and status >= 0 and status != TEMPORARY:
                raise self._failure(part, status, "before it was ready")
            if status is not None:
                self._note_ending(part, "it starts again")
                await self._restart(part, status)
            await asyncio.sleep(POLL_S)

    async def watch(self, stop: asyncio.Event) -> None:
        """Return when the run is over or `stop` is set.

        A part that ends with `TEMPORARY`, or on a full disk, is started again however often. Raises
        `ConfigError` with a part's own message when it refuses its configuration, `LostDataError` when its
        files are of no use, and `SluiceError` with its last lines when it keeps failing.
        """
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            watching = [
                tasks.create_task(self._keep_alive(part, over), name=part.name) for part in self.parts
            ]
            watching.append(tasks.create_task(self._keep_logs_short(), name="log files"))
            stopping = tasks.create_task(stop.wait())
            ending = tasks.create_task(over.wait())
            await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*watching, stopping, ending):
                task.cancel()

    async def end(self, *, except_part: str = "") -> None:
        """Send SIGTERM to every part, and kill those that do not end in time: first all at once that serve no
        others, and then one after the other those that do, the last started first. When it is cancelled, it
        kills every part at once."""
        ending = [part for part in reversed(self.parts) if part.name != except_part]
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in ending:
                    if not part.serves:
                        tasks.create_task(self._end(part), name=f"end {part.name}")
            for part in ending:
                if part.serves:
                    await self._end(part)
        except asyncio.CancelledError:
            for part in self.parts:
                _kill(part)
            raise

    def pids(self, name: str) -> list[int]:
        return [part.running.pid for part in self.parts if part.name == name and part.running is not None]

    @property
    def endings(self) -> dict[str, PartEnding]:
        """Return how the latest process of each part ended that has ended, by the part's name."""
        return {part.name: part.ending for part in self.parts if part.ending is not None}

    async def _keep_alive(self, part: Part, over: asyncio.Event) -> None:
        while True:
            if part.process is None:
                raise SluiceError(f"{part.name} was never started")
            status = await part.process.wait()
            self._note_ending(part, "it starts again")
            if status == 0 and part.ends_run:
                over.set()
                return
            if status == 0 and part.may_end():
                return
            await self._restart(part, status)

    async def _restart(self, part: Part, status: int) -> None:
        """Start a part again that ended with `status`, after a pause. Raises what `watch` does if it is one
        of too many failures, or one that no restart mends."""
        full = await self._wait_for_room(part) if status not in FINAL else False
        since = time.monotonic() - self._policy.window_s
        part.failed = [at for at in part.failed if at > since]
        if status != TEMPORARY and not full:
            part.failed.append(time.monotonic())
        if status in FINAL or len(part.failed) > self._policy.restarts:
            times = f"{len(part.failed)} times within {self._policy.window_s:g} s"
            raise self._failure(part, status, times)
        ended = part.ending.reason if part.ending is not None else ""
        log.warning("part_restarts", part=part.name, ended=ended, log=str(self._log_file(part)))
        recent = sum(at > since for at in part.started)
        pause_s = self._policy.first_pause_s * 2.0 ** min(recent - 1, MOST_DOUBLINGS)
        await asyncio.sleep(min(pause_s, self._policy.longest_pause_s))
        await self._spawn(part)
        self._goes_on(part, "it was started again")

    async def _wait_for_room(self, part: Part) -> bool:
        """Return whether the disk was full, once it is not: a part that cannot write would only end again."""
        full = False
        while lack := lack_of_room(self._logs):
            if not full:
                log.error("part_waits_for_room", part=part.name, reason=lack)
                self._goes_on(part, "it starts again once the disk has room")
            full = True
            await asyncio.sleep(ROOM_PERIOD_S)
        return full

    def _note_ending(self, part: Part, becomes: str) -> None:
        """Note how the latest process of a part ended, in the process's own words where it left some."""
        if part.process is None or (status := part.process.returncode) is None:
            return
        reason = ""
        if status != 0:
            own, _ = last_words(self._log_file(part), part.log_start)
            reason = " ".join(own.split()) or part.memory_kills.ending(status, part.smaller)
        part.ending = PartEnding(part.process.pid, time.monotonic(), reason, becomes)

    def _goes_on(self, part: Part, becomes: str) -> None:
        if part.ending is not None:
            part.ending = replace(part.ending, becomes=becomes)

    async def _keep_logs_short(self) -> None:
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            for part in self.parts:
                if await asyncio.to_thread(rotated, self._log_file(part)):
                    part.log_start = 0

    async def _spawn(self, part: Part) -> None:
        part.started.append(time.monotonic())
        part.memory_kills = MemoryKills()
        tied = tied_to_parent(part.command)
        with self._log_file(part).open("ab") as output:
            part.log_start = output.tell()
            part.process = await asyncio.create_subprocess_exec(
                *tied.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches us alone: we stop the parts in order
                preexec_fn=tied.preexec_fn,
                pass_fds=self._inherited,
                env=os.environ | part.environment | {SUPERVISOR: str(os.getpid())},
            )

    async def _end(self, part: Part) -> None:
        process = part.running
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        patience_s = min(part.drain_s, self._longest_drain_s)
        ending = asyncio.create_task(process.wait())
        await asyncio.wait([ending], timeout=min(SAY_AFTER_S, patience_s))
        if not ending.done() and patience_s > SAY_AFTER_S:
            log.warning("part_still_ends", part=part.name, killed_after_s=patience_s)
            await asyncio.wait([ending], timeout=patience_s - SAY_AFTER_S)
        if not ending.done():
            log.warning("part_killed", part=part.name, waited_s=patience_s)
            _kill(part)
        await ending
        self._note_ending(part, "the run ends")

    def _failure(self, part: Part, status: int, when: str) -> SluiceError:
        """Return why the run cannot go on, in the part's own message to the user or by its last lines."""
        self._longest_drain_s = self._policy.failed_drain_s
        own, last = last_words(self._log_file(part), part.log_start)
        if status in FINAL and own:
            return LostDataError(own) if status == LOST_DATA else ConfigError(own)
        return SluiceError(
            f"{part.name} ended {when}, last with {part.memory_kills.ending(status, part.smaller)}; "
            f"the end of {self._log_file(part)}:\n{last}"
        )

    def _log_file(self, part: Part) -> Path:
        return self._logs / f"{part.name}.log"


def _kill(part: Part) -> None:
    if part.running is None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(part.running.pid)
        for child in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
