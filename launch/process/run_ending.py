"""Notes in a run's directory how its latest launch ended, for whoever asks when no process is left."""

import asyncio
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bus.errors import SluiceError, leaves
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory

LONGEST = 2000
"""Characters of an error that are kept."""


@contextmanager
def noted_ending(run: RunDirectory, stop: asyncio.Event) -> Iterator[None]:
    """Note how what is inside ends: `stopped`, `failed`, or `ended` by itself, and the error if there is one.
    The note says `lost` meanwhile, which stays where the process is killed."""
    write_json(run.ending, {"state": "lost", "host": platform.node()})
    try:
        yield
    except BaseException as error:
        cancelled = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        state = "stopped" if cancelled or stop.is_set() else "failed"
        _note(run, state, "" if cancelled else error_text(error))
        raise
    _note(run, "stopped" if stop.is_set() else "ended")


def _note(run: RunDirectory, state: str, problem: str = "") -> None:
    with suppress(OSError):  # a full disk may be what ended it, which is the error to be told
        write_json(run.ending, {"state": state, "problem": problem})


def error_text(error: BaseException) -> str:
    first = next(leaves(error)) if isinstance(error, BaseExceptionGroup) else error
    text = str(first) if isinstance(first, SluiceError) else f"{type(first).__name__}: {first}"
    return text[:LONGEST]
