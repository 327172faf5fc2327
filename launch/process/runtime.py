"""The frame of every process: event loop, signals, logging, exit status."""

import asyncio
import json
import os
import re
import signal
import sys
import termios
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from bus.errors import BusError, ConfigError, DiskFullError, LostDataError, SluiceError, WorldError, leaves
from launch.process.log_settings import FAILED, log_failure, logs_json
from storage.disk.file_errors import file_error

T = TypeVar("T")
USAGE = 2
"""Exit status for an error that the user can mend."""
LOST_DATA = 65
"""Exit status for files that no restart mends (sysexits.h: EX_DATAERR)."""
TEMPORARY = 75
"""Exit status for what may pass, such as a bus that is away (sysexits.h: EX_TEMPFAIL)."""
FINAL = (USAGE, LOST_DATA)
"""Exit statuses after which starting the process again is useless."""
KILLED = 130
"""Exit status after a second Ctrl-C."""
PREFIX = "launch: "
SUPERVISOR = "SLUICE_SUPERVISOR"
"""Environment variable with the process id of the supervisor that started this process, if one did."""
RANK = "LOCAL_RANK"
"""Environment variable of a process that is one of several ranks of a learner."""
TAIL_BYTES = 16 << 10
TAIL_LINES = 15
ORPHAN_DRAIN_S = 30.0
"""Longest time that a process may take to end when its supervisor, and the bus with it, is gone."""


def run(main: Callable[[asyncio.Event], Awaitable[T]]) -> T:
    """Run `main` on uvloop with an event that SIGINT, SIGTERM or SIGHUP sets; a second ends it at once.

    An error made for the user, or of a file or a disk, ends the process with one message and no traceback,
    and with the status that `fail` gives it. Anything else is a bug and shows its traceback. Raises
    `BrokenPipeError` alone, of which launch/__main__.py makes an end where nobody reads the output any more.
    """
    import uvloop

    left: BrokenPipeError | None = None
    try:
        return uvloop.run(_with_signals(main))
    except* (SluiceError, OSError) as group:
        errors = list(leaves(group))
        left = next((error for error in errors if isinstance(error, BrokenPipeError)), None)
        if left is None:
            fail(*map(for_user, errors))
    except* asyncio.CancelledError:
        sys.exit(KILLED)
    assert left is not None
    raise left


def for_user(error: BaseException) -> BaseException:
    """Return what a user is told of an error; raises an error of the operating system that is a bug."""
    found = file_error(error) if isinstance(error, OSError) else error
    if found is None:
        raise error
    return found


def fail(*errors: BaseException) -> NoReturn:
    """Write each error to stderr, further lines indented, or as JSON where the log is JSON, and exit. The
    status is `USAGE` for a `ConfigError`, `LOST_DATA` for a `LostDataError`, `TEMPORARY` for a `BusError`
    that passes when the bus is back and for a full disk, and 1 for any other error."""
    ending = next((status for status in map(_status, errors) if status in FINAL), _status(errors[0]))
    for message in dict.fromkeys(str(error) for error in errors):
        if logs_json():
            log_failure(message, ending)
            continue
        indented = textwrap.indent(message, " " * len(PREFIX)).lstrip()
        print(PREFIX + indented, file=sys.stderr)  # noqa: T201 - the user's terminal
    if RANK in os.environ and any(isinstance(error, WorldError) for error in errors):
        sys.stderr.flush()
        os._exit(ending)  # threads may wait in a collective for a rank that is gone
    sys.exit(ending)


def _status(error: BaseException) -> int:
    from bus.waiting import is_away  # imports nats, and --help is to be quick

    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, LostDataError):
        return LOST_DATA
    passes = isinstance(error, DiskFullError) or (isinstance(error, BusError) and is_away(error))
    return TEMPORARY if passes else 1


def last_words(file: Path, begin: int) -> tuple[str, str]:
    """Return the messages that `fail` wrote among a process's other output in a file, and its last lines. The
    output begins at `begin`, in bytes."""
    with file.open("rb") as written:
        size = written.seek(0, 2)
        written.seek(max(begin, size - TAIL_BYTES))
        output = written.read().decode(errors="replace")
    # The ranks of a learner say the same.
    return "\n".join(dict.fromkeys(complaints(output))), "\n".join(output.splitlines()[-TAIL_LINES:])


def complaints(output: str) -> list[str]:
    """Return the messages that `fail` wrote among a process's other output."""
    indent = " " * len(PREFIX)
    found = re.findall(rf"^{PREFIX}(.*(?:\n{indent}.*)*)", output, re.MULTILINE)
    logged = filter(None, map(_logged_failure, output.splitlines()))
    return [*(message.replace(f"\n{indent}", "\n") for message in found), *logged]


def _logged_failure(line: str) -> str | None:
    """Return the message of a JSON line that says with which error its process ended."""
    if not line.startswith("{") or f'"{FAILED}"' not in line:
        return None
    try:
        logged = json.loads(line)
    except ValueError:  # the line's beginning was cut off
        return None
    return str(logged["reason"]) if logged.get("event") == FAILED else None


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[T]]) -> T:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(main(stop))
    is_asked = False

    def on_signal() -> None:
        nonlocal is_asked  # `stop` may be set by the work itself, such as of an actor whose run is done
        if is_asked:
            work.cancel("second signal")
        elif os.environ.get(SUPERVISOR, str(os.getppid())) != str(os.getppid()):
            loop.call_later(ORPHAN_DRAIN_S, work.cancel, "orphan")
        is_asked = True
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the user wants it to go on
        terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        loop.add_signal_handler(signal.SIGHUP, _on_hangup, terminals, on_signal)
    return await work


def _on_hangup(terminals: list[int], on_signal: Callable[[], None]) -> None:
    """Stop as on SIGTERM. What is written to a terminal that was closed goes nowhere instead of failing."""
    for stream in terminals:
        try:
            termios.tcgetattr(stream)
        except termios.error:
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream)
    on_signal()
