"""`launch soak --rolling`: all actors are restarted again and again, which must cost no prompt anything."""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import psutil
import structlog

from bus.codec import Json
from bus.errors import SluiceError
from bus.topology import ACK_WAIT_S
from bus.waiting import set_within
from learner.progress import lineage
from soak.lease_states import states_of
from soak.local_run import LocalRun
from soak.paced_lengths import LONGEST
from soak.soak import RUN, SETTINGS, START_TIMEOUT_S, accounted, wait_for_a_step
from storage.disk.atomic_files import read_json
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger import ATTEMPTS
from storage.ledger.ledger_reader import facts_of

log = structlog.get_logger()
ACTORS = "actors"
MOST_GRACE_S = 30.0
"""Longest time between SIGTERM and what follows it, as Kubernetes and Slurm have by default."""
LOOK_S = 0.2


@dataclass(frozen=True)
class Way:
    """How actors are restarted."""

    first: signal.Signals
    second: signal.Signals | None = None
    """Sent to those that live after the grace; None lets them finish what they have begun."""
    also_successor: bool = False
    """Says whether the successor is ended, too, as soon as attempts of what came back are counted."""

    @property
    def is_told(self) -> bool:
        """Return whether the actors can say why their rollouts ended: then no attempt may be counted."""
        return signal.SIGKILL not in (self.first, self.second)


WAYS = {
    "killed": Way(signal.SIGKILL),
    "cancelled": Way(signal.SIGTERM, signal.SIGTERM, also_successor=True),
    "stopped": Way(signal.SIGTERM),
    "preempted": Way(signal.SIGTERM, signal.SIGKILL),
}
"""Ways of a restart, which take turns."""


@dataclass(frozen=True)
class RollingPlan:
    """When actors are restarted, and how long rollouts take."""

    restarts: int
    interval_s: float
    """Time from one restart to the next; longer where the run takes longer to train again."""

    @property
    def longest_rollout_s(self) -> float:
        """Return how long the longest rollout takes: every restart finds some of them half done."""
        return self.interval_s / 2

    @property
    def grace_s(self) -> float:
        """Return the time after SIGTERM: shorter than most rollouts."""
        return min(MOST_GRACE_S, self.interval_s / 5)

    @property
    def patience_s(self) -> float:
        """Return the longest wait for rollouts: they are delivered again, repeated, and trained on."""
        return START_TIMEOUT_S + ACK_WAIT_S + 4 * self.longest_rollout_s


@dataclass
class RollingRun:
    """A run whose actors are restarted."""

    local: LocalRun
    plan: RollingPlan
    stop: asyncio.Event
    """Ends the restarts early."""
    restarts: list[Json] = field(default_factory=list)
    charged: dict[int, int] = field(default_factory=dict)
    """Attempts that were counted against each lease when it was looked at last."""
    issued: int = 0
    """Leases that had been issued before the latest restart."""
    broken: list[str] = field(default_factory=list)
    """Promises that were seen broken at once."""

    @property
    def run(self) -> RunDirectory:
        """Return the run's directory."""
        return self.local.run


async def run_rolling(plan: RollingPlan, directory: Path, stop: asyncio.Event) -> dict[str, Json]:
    """Restart all actors of a run as planned, stop it, and account for every trajectory.

    No process of the run survives this function. Raises `SluiceError` when the run does not train after a
    restart, gives up, does not end, or cannot be trained again. On `stop` a restart that has begun does not
    count, and those before it are accounted for, which waits for the rollouts that were theirs.
    """
    directory = await asyncio.to_thread(_made, directory)
    token_s = plan.longest_rollout_s / LONGEST
    settings = (*SETTINGS, "--actors.environment.settings", json.dumps({"token_s": token_s}))
    going = RollingRun(LocalRun(RunDirectory(directory, RUN), settings), plan, stop)
    began = time.monotonic()
    try:
        await going.local.start()
        await wait_for_a_step(going.local)
        await _keep_restarting(going)
        left_behind = await _left_behind(going)
        await going.local.end()
    finally:
        await going.local.kill()
    found = await accounted(going.run, time.monotonic() - began, until_lease=going.issued)
    return _report(going, left_behind, found)


def _made(directory: Path) -> Path:
    """Make a directory, and return its absolute path, which processes elsewhere find too."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()


async def _keep_restarting(going: RollingRun) -> None:
    pause_s = going.plan.interval_s
    for _, name in zip(range(going.plan.restarts), cycle(WAYS), strict=False):
        if await set_within(going.stop, pause_s):
            break
        began = time.monotonic()
        try:
            await _restart(going, name)
        except _StoppedError:
            log.info("restart_given_up", how=name)
            break
        left_s = began + going.plan.interval_s - time.monotonic()
        pause_s = max(left_s, going.plan.longest_rollout_s / 2)  # rollouts are half done again
    if not going.restarts:
        raise SluiceError("stopped before the first restart: there is nothing to account for")


class _StoppedError(SluiceError):
    """The restarts were stopped during one of them."""


async def _restart(going: RollingRun, name: str) -> None:
    """Restart all actors, and return when a group that they had not finished has been trained."""
    began = time.monotonic()
    rolling_out = Counter(state for state, _ in states_of(going.run.ledger).values())["issued"]
    await _end_actors(going, WAYS[name], name)
    successor: dict[str, Json] = {}
    if WAYS[name].also_successor:
        successor = {"successor_ended": await _end_successor(going, WAYS[name], name)}
    took_s = time.monotonic() - began
    newly = _newly_charged(going)  # before the successor begins an attempt
    going.charged |= _attempts(going.run)
    if newly and WAYS[name].is_told:
        going.broken.append(f"actors that were {name} had attempts counted against leases {newly}")
    states = states_of(going.run.ledger)
    going.issued = max(states) + 1
    finished = {lease for lease, (state, _) in states.items() if state != "issued"}
    if not await _within(going, lambda: bool(_trained(going.run) - finished), going.plan.patience_s):
        raise SluiceError(
            f"no group was rolled out and trained within {going.plan.patience_s:g} s after actors were "
            f"{name}: see {going.run.logs}"
        )
    found: dict[str, Json] = {
        "how": name, "groups_rolling_out": rolling_out, "attempts_counted": len(newly),
        "ended_within_s": round(took_s, 1), "trained_again_after_s": round(time.monotonic() - began, 1),
        **successor,
    }  # fmt: skip
    log.info("actors_restarted", **found)
    going.restarts.append(found)


async def _end_actors(going: RollingRun, way: Way, name: str) -> None:
    """End all actors; their supervisor starts them again.

    Raises `SluiceError` when there are none in time, or they do not end."""
    old: list[psutil.Process] = []

    def are_there() -> bool:
        old[:] = going.local.find(ACTORS)
        return bool(old)

    if not await _within(going, are_there, going.plan.patience_s):
        raise SluiceError(
            f"no actors ran within {going.plan.patience_s:g} s that could be {name}: see {going.run.logs}"
        )
    _send(old, way.first)
    if way.second is not None and not await _gone(going, old, going.plan.grace_s):
        _send(old, way.second)
    if not await _gone(going, old, going.plan.patience_s):
        raise SluiceError(f"actors that were {name} did not end: see {going.run.logs}")


async def _end_successor(going: RollingRun, way: Way, name: str) -> bool:
    """End the new actors, too, as soon as attempts of what came back are counted.

    Returns whether that was so. Where nothing comes back in time, since all rollouts ended within the grace,
    this restart says nothing of successors, and they live on."""
    if not await _within(going, lambda: bool(_newly_charged(going)), going.plan.patience_s):
        log.warning("successor_not_ended", how=name, reason="no attempt was counted in time")
        return False
    await _end_actors(going, way, name)
    return True


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


async def _gone(going: RollingRun, processes: list[psutil.Process], timeout_s: float) -> bool:
    """Wait until none of the processes is left; return whether that was in time."""
    old = {process.pid for process in processes}
    return await _within(going, lambda: not old & going.local.pids(ACTORS), timeout_s)


async def _left_behind(going: RollingRun) -> int:
    """Wait until all leases that were issued before the last restart are done; return how many are not."""

    def left() -> set[int]:
        rejected = {lease for lease, (state, _) in states_of(going.run.ledger).items() if state == "rejected"}
        return set(range(going.issued)) - _trained(going.run) - rejected

    await _within(going, lambda: not left(), going.plan.patience_s, until_stop=False)
    return len(left())


async def _within(
    going: RollingRun, condition: Callable[[], bool], timeout_s: float, *, until_stop: bool = True
) -> bool:
    """Wait for a condition; return whether it came in time.

    Raises `SluiceError` if the run gives up and, with `until_stop`, `_StoppedError` once it is to stop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        going.local.raise_if_ended()
        if time.monotonic() > deadline:
            return False
        if until_stop and going.stop.is_set():
            raise _StoppedError("stopped during a restart")
        await asyncio.sleep(LOOK_S)
    return True


def _newly_charged(going: RollingRun) -> list[int]:
    """Return the leases against which more attempts are counted than after the restart before."""
    counted = _attempts(going.run).items()
    return [lease for lease, attempts in counted if attempts > going.charged.get(lease, 0)]


def _attempts(run: RunDirectory) -> dict[int, int]:
    """Return how many attempts are counted against each lease that rolls out."""
    counted = {name: value for name, value in facts_of(run.ledger).items() if name.startswith(ATTEMPTS)}
    return {int(name.removeprefix(ATTEMPTS)): int(value) for name, value in counted.items()}


def _trained(run: RunDirectory) -> set[int]:
    """Return the leases that were trained on."""
    steps = lineage.steps(run.path / "lineage.jsonl").values()
    return {lease for step in steps for lease in step.leases}


def _report(going: RollingRun, left_behind: int, found: dict[str, Json]) -> dict[str, Json]:
    """Return the account with what the restarts must not have cost."""
    summary = read_json(going.run.summary, "it is written when the run ends")
    states = found["groups_by_state"]
    costs: dict[str, Json] = {
        "groups_left_behind": left_behind,
        "groups_rejected": states.get("rejected", 0) if isinstance(states, dict) else None,
        "messages_set_aside": summary["messages_set_aside"],
    }
    broken = [f"{name} is {value} instead of 0" for name, value in costs.items() if value != 0]
    return {
        "interval_s": going.plan.interval_s,
        "longest_rollout_s": going.plan.longest_rollout_s,
        "restarts": going.restarts,
        "broken_promises": [*going.broken, *broken],
        **costs,
        **found,
    }
