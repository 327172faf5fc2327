"""Faults that a soak injects into a `launch local`: killed processes, full disks, damaged streams."""

import asyncio
import os
import random
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bus.child_process import RUN_MODULE, die_with_parent, module_command
from bus.errors import SluiceError
from bus.topology import ACK_WAIT_S
from storage.disk.run_directory import RunDirectory

PARTS = ("actors", "storage", "learner", "bus")
END_TIMEOUT_S = 180.0
ORPHAN_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 3.0
"""Longest wait until killed processes are gone; the kernel may hold one for longer."""
CONNECT_TIMEOUT_S = 5.0


@dataclass
class LocalRun:
    """A `launch local` in a child process, into which faults are injected."""

    run: RunDirectory
    settings: Sequence[str]
    """Flags of its command."""
    random: random.Random
    log_name: str = "soak.log"
    faults: Counter[str] = field(default_factory=Counter)
    process: asyncio.subprocess.Process | None = None
    slow_consumers: ExitStack = field(default_factory=ExitStack)
    """Connections to the bus that read nothing of what they subscribed to."""

    @property
    def kills(self) -> int:
        """Processes killed so far."""
        return sum(n for kind, n in self.faults.items() if kind.startswith("killed"))

    @property
    def log(self) -> Path:
        """File with the output of its processes."""
        return self.run.path.parent / self.log_name

    async def start(self) -> None:
        """Start the run, or start it again."""
        with self.log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *module_command("launch", "local", "--directory", str(self.run.path.parent)), *self.settings,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                preexec_fn=die_with_parent(),
            )  # fmt: skip

    async def end(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Interrupt the run and wait for its end.

        Raises `SluiceError` when it does not end in time (then call `kill`), or ends with an error.
        """
        self.slow_consumers.close()
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
        self.slow_consumers.close()
        if self.process is None or self.process.returncode is not None:
            return
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
        if self.process is not None and self.process.returncode is not None:
            raise SluiceError(
                f"the run gave up with status {self.process.returncode} after {dict(self.faults)}: "
                f"see {self.log}"
            )

    def terminate(self, name: str) -> None:
        """Send SIGTERM to a part; its supervisor starts it again."""
        for process in self._find(name):
            with suppress(psutil.NoSuchProcess):
                process.terminate()

    # --- faults ---

    async def inject_fault(self, left_s: float) -> None:
        """Inject one fault, drawn at random among those that are over within `left_s`; most take no time."""
        faults: list[tuple[float, float, Callable[[], Coroutine[Any, Any, None]]]] = [
            (60, 0, self._kill_part),
            (12, 0, self._kill_server),
            (8, 0, self._kill_supervisor),
            (12, 0, self._suspend_briefly),
            (2, 3 * ACK_WAIT_S, self._suspend_beyond_ack_wait),
            (8, 0, self._fill_disk),
            (4, 0, self._connect_slow_consumer),
            (6, 0, self._damage_bus),
        ]
        possible = [(weight, do) for weight, needs_s, do in faults if needs_s <= max(left_s, 0)]
        [chosen] = self.random.choices([do for _, do in possible], weights=[weight for weight, _ in possible])
        await chosen()

    async def _kill_part(self) -> None:
        self._kill(self.random.choice(PARTS))

    async def _kill_server(self) -> None:
        self._kill("nats-server")

    async def _kill_supervisor(self) -> None:
        await self._kill_everything()
        await self.start()

    async def _suspend_briefly(self) -> None:
        """Suspend a part, sometimes for longer than a silent holder keeps its role."""
        await self._suspend(self.random.choice(PARTS[:3]), self.random.uniform(2, 9))

    async def _suspend_beyond_ack_wait(self) -> None:
        """Suspend a part until the messages that it fetched are delivered to others."""
        await self._suspend(self.random.choice(PARTS[:3]), ACK_WAIT_S + 5)

    async def _fill_disk(self) -> None:
        """Let no file of a process grow for a while: its writes fail, with EFBIG for ENOSPC."""
        name = self.random.choice(("storage", "learner", "nats-server"))
        for process in self._find(name):
            with suppress(psutil.NoSuchProcess):
                _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
                process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
                self.faults[f"disk full for {name}"] += 1
                await asyncio.sleep(self.random.uniform(1, 5))
                process.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))

    async def _connect_slow_consumer(self) -> None:
        """Connect a client that subscribes to every message of the run and reads none."""
        for process in self._find("nats-server"):
            with suppress(psutil.Error, OSError):
                ports = [c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
                subject = f"sluice.{self.run.path.name}.>"
                self.slow_consumers.enter_context(
                    closing(await asyncio.to_thread(_slow_consumer, ports[0], subject))
                )
                self.faults["slow consumer"] += 1

    async def _damage_bus(self) -> None:
        """Truncate a block, flip a bit or wipe the directory, as Jepsen did when it broke NATS 2.12.1."""
        how = self.random.choice(["truncated", "flipped", "wiped"])
        await self._kill_everything()
        store = self.run.bus / "jetstream"
        blocks = sorted(path for path in store.rglob("*.blk") if path.stat().st_size > 0)
        if how == "wiped":
            shutil.rmtree(store, ignore_errors=True)
        elif blocks:
            _damage(self.random.choice(blocks), how, self.random)
        self.faults[f"bus directory {how}"] += 1
        await self.start()

    def _kill(self, name: str) -> None:
        for process in self._find(name):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                self.faults[f"killed {name}"] += 1

    async def _suspend(self, name: str, seconds: float) -> None:
        for process in self._find(name):
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                kind = "suspended beyond the ack wait" if seconds > ACK_WAIT_S else "suspended"
                self.faults[f"{kind}: {name}"] += 1
                await asyncio.sleep(seconds)
                process.resume()

    async def _kill_everything(self) -> None:
        self.raise_if_ended()
        await self.kill()
        self.faults["killed supervisor"] += 1

    def _find(self, name: str) -> Iterator[psutil.Process]:
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


def _slow_consumer(port: int, subject: str) -> socket.socket:
    """Connect a client that subscribes and never reads again; its receive buffer is small."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(CONNECT_TIMEOUT_S)
    client.connect(("127.0.0.1", port))
    client.recv(4096)
    client.sendall(f'CONNECT {{"verbose":false}}\r\nSUB {subject} 1\r\n'.encode())
    return client


def _damage(path: Path, how: str, draw: random.Random) -> None:
    size = path.stat().st_size
    if how == "truncated":
        os.truncate(path, draw.randrange(size))
        return
    with path.open("r+b") as file:
        position = draw.randrange(size)
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << draw.randrange(8))]))
