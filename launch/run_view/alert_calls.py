"""Calls the user's command or URL when a run fails or is lost, and when an alarm of it begins."""

import asyncio
import json
import os
import shlex
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from tempfile import TemporaryFile

import aiohttp
import structlog
from pydantic import TypeAdapter

from bus.codec import Json
from bus.connection.bus import Bus
from bus.errors import ConfigError, StorageError
from bus.messages import Status
from bus.waiting import set_within
from launch.process.run_ending import error_text
from launch.process.runtime import SUPERVISOR
from launch.run_view.monitor import RunMonitor, RunSettings
from launch.run_view.run_files import RunFiles
from launch.settings.run_config import RunConfig
from learner.metrics.alarms import STEPS
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import integer

log = structlog.get_logger()
LIMIT_S = 10.0
"""Longest time of one call."""
LOST_S = 120.0
"""Silence after which a learner that was heard counts as lost."""
LOOK_S = 1.0
ALARMS = TypeAdapter(dict[str, int])
SHOWN = 500
"""Characters that are logged of what a command writes to stderr."""


class AlertCalls:
    """Tells of one run. A call that fails is logged, and ends nothing."""

    def __init__(self, config: RunConfig) -> None:
        """Raises `ConfigError` for a command whose program is not on this host."""
        self._config = config
        self._command = shlex.split(config.monitoring.alert_command or "")
        self._url = config.monitoring.alert_url
        if self._command and shutil.which(self._command[0]) is None:
            raise ConfigError(
                f"monitoring.alert_command: there is no program {self._command[0]!r} on this host"
            )

    async def tell(self, state: str, reason: str, step: int) -> None:
        """Call with the event as JSON: the command on its standard input, the URL by POST."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        event: dict[str, str | int] = {
            "run": self._config.run,
            "state": state,
            "reason": reason,
            "step": step,
            "time": now,
        }
        if self._command:
            await _within_limit("command", self._start(f"{json.dumps(event)}\n".encode()), state)
        if self._url is not None:
            await _within_limit("url", self._post(self._url, event), state)

    async def _start(self, event: bytes) -> str:
        # stderr is no pipe: its end would wait for whatever the command leaves running
        with TemporaryFile() as said:
            child = await asyncio.create_subprocess_exec(
                *self._command, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=said,
            )  # fmt: skip
            try:
                await child.communicate(event)
            finally:
                if child.returncode is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    await child.wait()
            said.seek(0)
            text = said.read().decode(errors="replace").strip()[-SHOWN:]
        return f"the command ended with status {child.returncode}: {text}" if child.returncode else ""

    async def _post(self, url: str, event: dict[str, str | int]) -> str:
        async with aiohttp.ClientSession() as client, client.post(url, json=event) as answer:
            return "" if answer.ok else f"the server answered with status {answer.status}"

    async def watch_learner(self, bus: Bus, stop: asyncio.Event) -> None:
        """Hear the learner of a run that no screen shows here, and `watch` it."""
        monitor = RunMonitor(RunSettings.of_run(self._config))
        await bus.listen(bus.subject("status", "learner"), Status, monitor.on_status)
        await self.watch(monitor, stop)

    async def watch(self, monitor: RunMonitor, stop: asyncio.Event) -> None:
        """Tell of each alarm of the learner that begins, and of a learner that falls silent, until `stop`."""
        alarms, is_lost = _HeldAlarms(RunDirectory(self._config.directory, self._config.run)), False
        while not stop.is_set():
            learner, values = monitor.processes.get("learner"), monitor.values("learner")
            for alarm in alarms.begun(values):
                await self.tell("alarm", alarm, integer(values, "step"))
            await asyncio.to_thread(alarms.keep)
            silent_s = 0.0 if learner is None or monitor.stage == "done" else monitor.silent_s(learner)
            if silent_s > LOST_S and not is_lost:
                why = f"the learner was heard {silent_s:.0f} s ago for the last time"
                if learner is not None and (failure := monitor.failure(learner)):
                    why = f"{why}: {failure}"
                await self.tell("lost", why, integer(values, "step"))
            is_lost = silent_s > LOST_S
            await set_within(stop, LOOK_S)

    @asynccontextmanager
    async def failure_told(self, run: RunDirectory) -> AsyncIterator[None]:
        """Tell when what is inside ends by an error that the run's directory notes as its failure, or has no
        room to note."""
        try:
            yield
        except BaseException as error:
            files = RunFiles(run.path, lenient=True)
            if files.ending.state != "stopped":
                reason = files.ending.problem or error_text(error)
                await self.tell("failed", reason, files.trained_steps or 0)
            raise

    async def tell_if_orphaned(self, run: RunDirectory) -> None:
        """Tell that the run is lost where the supervisor of this process was killed."""
        if os.environ.get(SUPERVISOR, str(os.getppid())) != str(os.getppid()):
            step = RunFiles(run.path, lenient=True).trained_steps or 0
            await self.tell("lost", "the process that supervised the run was killed", step)


class _HeldAlarms:
    """Knows which alarms of a run were told and still hold, also after a restart of who tells of them. A
    learner that starts again says an alarm anew only after some steps: until then it has not ended."""

    def __init__(self, run: RunDirectory) -> None:
        self._file = run.alarms
        self._kept: dict[str, int] = {}
        self._is_refused = False
        """Whether the disk refused them at the last look."""
        try:
            self._kept = ALARMS.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:  # what was told is told again
            log.warning("alarms_not_read", file=str(self._file), reason=str(error))
        self._latest = self._kept
        """Step at which each alarm was said last."""

    def begun(self, values: Mapping[str, Json]) -> list[str]:
        """Return the alarms that began, in words; none where no learner was heard yet."""
        said, step = values.get("alarms"), integer(values, "step") + integer(values, "warmup_step")
        if not isinstance(said, Mapping):
            return []
        held = {name: last for name, last in self._latest.items() if name in said or step < last + STEPS}
        self._latest = held | dict.fromkeys(said, step)
        return [str(text) for name, text in said.items() if name not in held]

    def keep(self) -> None:
        """Write which alarms hold, once they were told: one that is told twice harms less than none."""
        if self._latest == self._kept:
            return
        try:
            write_json(self._file, dict(self._latest))
        except (OSError, StorageError) as error:  # tried again at the next look
            if not self._is_refused:
                log.warning("alarms_not_kept", file=str(self._file), reason=str(error))
            self._is_refused = True
        else:
            self._kept, self._is_refused = self._latest, False


async def _within_limit(what: str, call: Awaitable[str], state: str) -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            problem = await call
    except TimeoutError:
        problem = f"the call took longer than {LIMIT_S:g} s"
    except (OSError, ValueError, aiohttp.ClientError) as error:  # a host name may be none
        problem = str(error) or type(error).__name__
    if problem:
        log.warning("alert_not_delivered", by=what, state=state, reason=problem)
    else:
        log.info("alert_delivered", by=what, state=state)
