"""`launch runs stop`: ends a run that `launch local` started on this host, in order."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

import psutil
import structlog

from bus.errors import ConfigError, SluiceError
from bus.waiting import SLOW_S
from launch.run_view.recorded_runs import lock_files, supervisor_of
from storage.disk.file_users import hidden_owner, processes_holding

log = structlog.get_logger()
POLL_S = 0.2


def stop_run(path: Path, timeout_s: float) -> str:
    """Send SIGTERM to the `launch local` of a run, and return in words what came of it.

    Its parts then end in order: the learner finishes its step and saves a checkpoint. Raises `ConfigError`
    for a run whose processes were started one by one or by Slurm, or cannot be seen, and `SluiceError` when
    it has not ended in time."""
    pids = sorted({pid for held in processes_holding(lock_files(path)).values() for pid in held})
    if not pids and (owner := hidden_owner(path)) is not None:
        raise ConfigError(
            f"run {path.name!r} belongs to {owner}, whose processes this user cannot see: whether it goes on "
            f"is not known. Stop it as {owner}"
        )
    supervisor = supervisor_of(path)
    if supervisor is None and (path / "slurm" / "bus").exists():
        raise ConfigError(
            f"run {path.name!r} is a job of Slurm, which requeues a job whose processes end: end it by "
            f"`scancel --batch --signal=USR2 --me --name=sluice-{path.name}`, which saves a checkpoint, or "
            f"at once by `scancel --me --name=sluice-{path.name},sluice-{path.name}-actors`"
        )
    if not pids:
        return f"run {path.name!r} is not going on, on this host: nothing to stop"
    if supervisor is None:
        raise ConfigError(
            f"run {path.name!r} was not started by `launch local`, or that has ended and its parts are "
            f"ending too: its processes here are {_named(pids)}. Stop each by `kill -TERM`"
        )
    with suppress(ProcessLookupError):
        os.kill(supervisor, signal.SIGTERM)
    if alive := _still_alive(_processes(pids), timeout_s):
        raise SluiceError(
            f"run {path.name!r} has not ended within {timeout_s:g} s, it may be saving a checkpoint: its "
            f"processes are {_named([process.pid for process in alive])}. Wait, or stop it again to end it "
            "at once"
        )
    return f"run {path.name!r} has stopped; the command that started it takes it up again"


def _still_alive(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for the end of processes that are not our children, and return those that go on all the same."""
    began = time.monotonic()
    say_at = began + SLOW_S
    while alive := [process for process in processes if _runs(process)]:
        if time.monotonic() > began + timeout_s:
            return alive
        if time.monotonic() > say_at:
            say_at = inf
            log.warning("run_still_ends", processes=_named([one.pid for one in alive]), longest_s=timeout_s)
        time.sleep(POLL_S)  # psutil's own wait looks so often that it takes a quarter of a processor
    return []


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _processes(pids: Sequence[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _named(pids: Sequence[int]) -> str:
    words = []
    for process in _processes(pids):
        with suppress(psutil.Error):
            command = [part for part in process.cmdline() if not part.startswith("-")]
            words.append(f"{process.pid} ({' '.join(map(os.path.basename, command[:4]))})")
    return ", ".join(words)
