"""What a rolling restart does when it cannot: no actors are there, nothing comes back, or it is stopped."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from bus.errors import SluiceError
from soak import rolling
from soak.local_run import LocalRun
from soak.rolling import WAYS, RollingPlan, RollingRun
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger import ATTEMPTS, Ledger

SUPERVISOR = "while true; do bash -c 'exec -a actors sleep 100'; done"
"""Starts actors again whenever they end."""


@pytest.fixture
async def going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a rolling run of a supervisor that is a shell command; kills what is left of it."""
    monkeypatch.setattr(rolling, "LOOK_S", 0.01)
    monkeypatch.setattr(rolling, "ACK_WAIT_S", 0.0)
    started = []

    async def going(command: str, patience_s: float = 20.0) -> RollingRun:
        monkeypatch.setattr(rolling, "START_TIMEOUT_S", patience_s)
        local = LocalRun(RunDirectory(tmp_path, "soak"), ())
        local.process = await asyncio.create_subprocess_exec("bash", "-c", command, start_new_session=True)
        started.append(local)
        with closing(Ledger.open(local.run.ledger)) as ledger:
            ledger.issue(2, policy_version=0)
            ledger.flush()
        return RollingRun(local, RollingPlan(restarts=1, interval_s=0.01), asyncio.Event())

    yield going
    for local in started:
        with suppress(ProcessLookupError):
            os.killpg(local.process.pid, signal.SIGKILL)
        await local.process.wait()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The processes that each call of `_end_actors` has ended."""
    calls: list[set[int]] = []
    end_actors = rolling._end_actors

    async def recorded(going: RollingRun, *way: object) -> None:
        before = going.local.pids("actors")
        await end_actors(going, *way)
        calls.append(before)

    monkeypatch.setattr(rolling, "_end_actors", recorded)
    return calls


async def actors_of(going: RollingRun) -> set[int]:
    async with asyncio.timeout(60):
        while not (found := going.local.pids("actors")):  # noqa: ASYNC110 - processes tell nobody
            await asyncio.sleep(0.01)
    return found


async def test_actors_are_ended_and_their_supervisor_starts_others(going: Callable):
    run = await going(SUPERVISOR)
    old = await actors_of(run)
    await rolling._end_actors(run, WAYS["killed"], "killed")
    assert not old & await actors_of(run)


async def test_a_restart_that_finds_no_actors_fails(going: Callable):
    run = await going("sleep 100; true", patience_s=0.1)
    with pytest.raises(SluiceError, match=r"no actors ran within 0\.12 s that could be killed"):
        await rolling._end_actors(run, WAYS["killed"], "killed")


@pytest.mark.parametrize("charged", [True, False])
async def test_whether_the_successor_was_ended_is_recorded(
    charged: bool, going: Callable, ended: list, monkeypatch: pytest.MonkeyPatch
):
    run = await going(SUPERVISOR, patience_s=20.0 if charged else 0.1)
    await actors_of(run)
    if charged:
        with closing(Ledger.open(run.run.ledger)) as ledger:
            ledger.set_fact(f"{ATTEMPTS}0", "1")
            ledger.flush()
    monkeypatch.setattr(rolling, "_trained", lambda _: {7})  # the run has no learner
    await rolling._restart(run, "cancelled")
    [found] = run.restarts
    assert (found["how"], found["successor_ended"]) == ("cancelled", charged)
    assert len(ended) == 1 + charged


async def test_a_stop_ends_a_restart_that_waits_and_does_not_count_it(going: Callable):
    run = await going(SUPERVISOR, patience_s=1000.0)
    asyncio.get_running_loop().call_later(0.2, run.stop.set)
    async with asyncio.timeout(60):
        with pytest.raises(SluiceError, match="stopped before the first restart"):
            await rolling._keep_restarting(run)
    assert run.restarts == []
