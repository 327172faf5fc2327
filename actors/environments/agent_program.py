"""Runs a program that others wrote: bounded in time and output, and ended with all of its process group."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from actors.environments.agent_config import AgentConfig
from bus.child_process import tied_to_parent
from bus.errors import ConfigError, SluiceError
from bus.plugins import refuse_of_record
from bus.waiting import cancelled

PRIVATE = ("SLUICE_", "OPENAI_", "ANTHROPIC_")
"""Beginnings of variables that no program inherits: the bus's address and keys, and real servers' keys."""

TAIL_BYTES = 4096
"""What is kept of a program's output: its end, which says what went wrong."""
READ_BYTES = 1 << 16
TERMINATE_S = 2.0
"""Time that a program has to end after SIGTERM."""
STOP_S = 3.0
"""Time that running episodes get when the actor is told to stop; then their groups go back to the run."""
KILL_S = 5.0
"""Longest time that the kernel may take to end a program."""
LAST_OUTPUT_S = 1.0


class ProgramError(SluiceError):
    """A program could not be run to its end. After a timeout its cause is `TimeoutError`."""


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended by itself."""

    status: int
    """Exit status; negative for the signal that ended it."""
    output: str
    """The end of its output."""


def check_program(config: AgentConfig) -> None:
    """Raise `ConfigError` for a program that is not there, or that this host does not allow."""
    command = config.command
    refuse_of_record(f"actors.environment.command={command!r}", command, is_program=True)
    for name, value in config.variables.items():  # some of them decide what the program loads
        refuse_of_record(f"actors.environment.variables.{name}={value!r}", value, is_program=True)
    program = config.arguments[0]
    if shutil.which(program) is None:
        raise ConfigError(f"actors.environment.command: there is no program {program!r}: give its path")
    if missing := [name for name in config.packages if find_spec(name) is None]:
        names = " ".join(missing)
        raise ConfigError(
            f"actors.environment.packages: {command!r} needs {names}, which {sys.executable} does not have: "
            f"{sys.executable} -m pip install {names}"
        )
    if (script := _script(config.arguments)) is not None and not Path(script).is_file():
        raise ConfigError(
            f"actors.environment.command: {command!r} names {script}, which is no file in {Path.cwd()}: "
            "start where it is, or give its whole path"
        )


def _script(arguments: Sequence[str]) -> str | None:
    """Return the script that a command has Python run; None for any other command."""
    if not Path(arguments[0]).name.startswith("python"):
        return None
    options = [*takewhile(lambda word: word.startswith("-"), arguments[1:])]
    first = "".join(arguments[1 + len(options) : 2 + len(options)])
    return first if first.endswith(".py") and not {"-m", "-c"} & {*options} else None


def program_variables(config: AgentConfig, url: str, key: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that asks the gateway at `url` with `key`; `own` tells its task."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
    near = ",".join(filter(None, [inherited.get("NO_PROXY"), urlsplit(url).hostname]))
    return {
        **inherited,
        "NO_PROXY": near,
        "no_proxy": near,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "SLUICE_MODEL": config.gateway.model,
        **own,
        **config.variables,
    }


async def run_program(
    arguments: Sequence[str], variables: Mapping[str, str], *,
    timeout_s: float | None, most_output_bytes: int | None,
) -> ProgramEnd:  # fmt: skip
    """Run a program until it ends; `None` sets no bound. Raises `ProgramError`.

    However this ends, also by cancellation, no process of the program's group is left."""
    tied = tied_to_parent(arguments, signal.SIGKILL, path=variables.get("PATH"))
    async with _output(most_output_bytes) as (output, writing):
        try:
            process = await asyncio.create_subprocess_exec(
                *tied.command, stdin=asyncio.subprocess.DEVNULL, stdout=writing, stderr=writing,
                env=variables, start_new_session=True, preexec_fn=tied.preexec_fn,
            )  # fmt: skip
        except OSError as error:
            raise ProgramError(f"cannot start {arguments[0]!r}: {error.strerror}") from error
        finally:
            os.close(writing)
        ending = asyncio.create_task(process.wait(), name=f"wait for {arguments[0]}")
        try:
            watched: set[asyncio.Future[Any]] = {ending, output.overflown}
            done, _ = await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end_group(process.pid, ending)
        await output.settle()
        if ending in done:
            return ProgramEnd(ending.result(), output.tail)
        if output.overflown in done:
            raise ProgramError(f"it wrote more than {most_output_bytes} bytes; the last: {output.tail}")
        raise ProgramError(f"it ran for {timeout_s:g} s; its last output: {output.tail}") from TimeoutError()


async def _end_group(pid: int, ending: asyncio.Task[int]) -> None:
    """End what is left of the process group; its leader may have ended already."""
    if not ending.done():
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
        await asyncio.wait([ending], timeout=TERMINATE_S)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    await asyncio.wait([ending], timeout=KILL_S)


class _Output:
    """Reads what a program writes, and keeps the end of it."""

    def __init__(self, most_bytes: int | None) -> None:
        self.overflown: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the program has written more than it may."""
        self._most_bytes = most_bytes
        self._size = 0
        self._tail = b""
        self._reading: asyncio.Task[None] | None = None

    @property
    def tail(self) -> str:
        """Return the end of the output; what is no UTF-8 is replaced."""
        return self._tail.decode(errors="replace").strip()

    def begin(self, reader: asyncio.StreamReader) -> None:
        """Read until nobody can write any more."""
        self._reading = asyncio.create_task(self._read(reader), name="output of a program")

    async def settle(self) -> None:
        """Wait a moment for what was written last; a process that left the group may hold the pipe open."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=LAST_OUTPUT_S)

    async def close(self) -> None:
        """Read no more."""
        if self._reading is not None:
            await cancelled(self._reading)
        self.overflown.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while part := await reader.read(READ_BYTES):
            self._size += len(part)
            self._tail = (self._tail + part)[-TAIL_BYTES:]
            limit = self._most_bytes
            if limit is not None and self._size > limit and not self.overflown.done():
                self.overflown.set_result(None)


@asynccontextmanager
async def _output(most_bytes: int | None) -> AsyncIterator[tuple[_Output, int]]:
    """Yield a reader, and the descriptor of the pipe into which a program writes.

    asyncio's own pipes would have `wait` last until every process that inherited one has ended."""
    reading, writing = os.pipe()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", buffering=0)
    )
    output = _Output(most_bytes)
    output.begin(reader)
    try:
        yield output, writing
    finally:
        await output.close()
        transport.close()
