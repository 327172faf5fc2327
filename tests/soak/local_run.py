"""A `launch local` in a child process: started, ended, killed, and its processes found by name."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bus.codec import Json
from bus.connection.bus import Bus
from bus.errors import SluiceError
from bus.messages import RunRecord
from bus.process.child_process import RUN_MODULE, module_command, tied_to_parent
from launch.process.runtime import TEMPORARY
from launch.settings.environment_variables import without_setting_variables
from launch.settings.run_config import resolve
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory

END_TIMEOUT_S = 180.0
ORPHAN_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 3.0
"""Longest wait until killed processes are gone; the kernel may hold one for longer."""


@dataclass
class LocalRun:
    """A `launch local` in a child process."""

    run: RunDirectory
    settings: Sequence[str]
    """Flags of its command."""
    log_name: str = "soak.log"
    process: asyncio.subprocess.Process | None = None
    killed: bool = False
    """Says whether it was killed since it was started last."""
    restarts: int = 0
    """Times that it was started again because the bus was away when it started."""

    @property
    def log(self) -> Path:
        """File with the output of its processes."""
        return self.run.path.parent / self.log_name

    async def start(self) -> None:
        """Start the run, or start it again."""
        self.killed = False
        command = module_command("launch", "local", "--directory", str(self.run.path.parent))
        tied = tied_to_parent([*command, *self.settings])
        with self.log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *tied.command,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                preexec_fn=tied.preexec_fn, env=without_setting_variables(),
            )  # fmt: skip

    async def end(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Interrupt the run and wait for its end.

        Raises `SluiceError` when it does not end in time (then call `kill`), or ends with an error.
        """
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(timeout_s):
                status = await self.process.wait()
        except TimeoutError:
            raise SluiceError(f"the run did not end within {timeout_s:.3g} s: see {self.log}") from None
        if status != 0:
            raise SluiceError(f"the run ended with status {status}: see {self.log}")

    async def kill(self, patience_s: float = ORPHAN_TIMEOUT_S) -> None:
        """Kill the supervisor, then those of its children that did not end by themselves.

        Args:
            patience_s: time that the children have to end; 0 kills every process at once.
        """
        if self.process is None or self.process.returncode is not None:
            return
        self.killed = True
        children: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # it may end just now
            children = _kill(psutil.Process(self.process.pid))
        await self.process.wait()
        _, orphans = await asyncio.to_thread(psutil.wait_procs, children, timeout=patience_s)
        for orphan in orphans:
            _kill_all(orphan)
        await asyncio.to_thread(psutil.wait_procs, orphans, timeout=GONE_TIMEOUT_S)

    def raise_if_ended(self) -> None:
        """Raise `SluiceError` if the run has given up."""
        if self.process is not None and self.process.returncode is not None and not self.killed:
            raise SluiceError(f"the run gave up with status {self.process.returncode}: see {self.log}")

    async def go_on(self) -> bool:
        """Start the run again if it ended because the bus was away, and return whether it did, as systemd
        would. Raises `SluiceError` if it has given up."""
        if self.process is None or self.process.returncode != TEMPORARY:
            self.raise_if_ended()
            return False
        await self.start()
        self.restarts += 1
        return True

    def terminate(self, name: str) -> None:
        """Send SIGTERM to a part; its supervisor starts it again."""
        for process in self.find(name):
            with suppress(psutil.NoSuchProcess):
                process.terminate()

    async def restart_storage(self, settings: dict[str, Json]) -> None:
        """Have storage end and start again with other settings. The run's record has them first: storage
        refuses settings that a living learner or actor has not joined with."""
        config = resolve(settings)
        await asyncio.to_thread(write_json, self.run.asked_config, settings)
        ending = list(self.find("storage"))
        self.terminate("storage")
        await asyncio.to_thread(psutil.wait_procs, ending, timeout=END_TIMEOUT_S)
        async with Bus.connect(config.bus, config.run, name="settings") as bus:
            await bus.put("run", RunRecord(name=config.run, config_json=config.model_dump_json()))

    def pids(self, name: str) -> set[int]:
        """Return the numbers of the running processes of one part."""
        return {process.pid for process in self.find(name)}

    def find(self, name: str) -> Iterator[psutil.Process]:
        """Find the running processes of one part."""
        if self.process is None or self.process.returncode is not None:
            return
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    command = child.cmdline()
                    program = Path(command[0]).name if command else ""  # a zombie has no command
                    if name in (launch_command(command), program):
                        yield child


def launch_command(arguments: Sequence[str]) -> str:
    """Return which command of `launch` a process with these arguments runs; empty for another program."""
    for start, module, command in zip(arguments, arguments[1:], arguments[2:], strict=False):
        if start in ("-m", RUN_MODULE) and module == "launch":
            return command
    return ""


def _kill(process: psutil.Process) -> list[psutil.Process]:
    """Kill a process, whatever is raised; return its descendants.

    It is suspended before they are looked up, so that it starts no more of them meanwhile.
    """
    started: list[psutil.Process] = []
    try:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            started = process.children(recursive=True)
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return started


def _kill_all(process: psutil.Process) -> None:
    """Kill a process before its descendants, so that it starts none in their place."""
    for child in _kill(process):
        _kill_all(child)
