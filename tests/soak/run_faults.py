"""Faults of a run's processes: kills, suspensions, full disks, clocks that jump, names used twice."""

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psutil

from bus.config import URL_VARIABLE
from bus.process.child_process import die_with_parent, module_command
from bus.topology import ACK_WAIT_S
from launch.process.runtime import TEMPORARY, USAGE
from launch.settings.environment_variables import without_setting_variables
from soak.disk import fill
from soak.faults import Fault, Target, send_signal

PARTS = ("actors", "storage", "learner")
REFUSED_WITHIN_S = 180.0
"""Longest time that a second process of a name may take to be refused."""
LOOK_S = 0.2
"""Time between two looks at whether the first process of a name lives: shorter than a successor starts in."""
HOLDS = {"learner": "learner", "storage": "dispatcher"}
"""Role by which a process of this command has its name."""
CLOCK_JUMP_S = 3600
ACK_PATIENCE_S = 8.0
"""Longest wait for storage to ack trajectories."""


async def kill_part(target: Target) -> None:
    """Kill the actors, storage or the learner."""
    name = target.random.choice(PARTS)
    _kill(target, name, f"killed {name}")


async def kill_after_ack(target: Target) -> None:
    """Kill storage just when it has acked trajectories: what it did not write before is lost."""
    await target.servers.on_ack(
        target.local.run.name, target.stream(), ACK_PATIENCE_S,
        lambda: _kill(target, "storage", "killed storage after an ack"),
    )  # fmt: skip


async def kill_supervisor(target: Target) -> None:
    """Kill the supervisor and what it started, and start the run again."""
    await target.local.go_on()
    await target.local.kill()
    target.faults["killed supervisor"] += 1
    await target.local.start()


async def power_cut(target: Target) -> None:
    """Kill every process at once, servers of the bus included."""
    await target.local.go_on()
    await target.local.kill(patience_s=0)
    for server in target.servers.servers:
        send_signal(server, signal.SIGKILL)
    target.faults["killed everything at once"] += 1
    await target.local.start()


async def suspend_briefly(target: Target) -> None:
    """Suspend a part, sometimes for longer than a silent holder keeps its role."""
    await _suspend(target, target.random.uniform(2, 9), "suspended")


async def suspend_beyond_ack_wait(target: Target) -> None:
    """Suspend a part until the messages that it fetched are delivered to others."""
    await _suspend(target, ACK_WAIT_S + 5, "suspended beyond the ack wait")


async def forbid_writes(target: Target) -> None:
    """Let no file of a process grow for a while: its writes fail, with EFBIG for ENOSPC."""
    name = target.random.choice(("storage", "learner"))
    for process in target.local.find(name):
        with suppress(psutil.NoSuchProcess):
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
            target.faults[f"no file of {name} may grow"] += 1
            await asyncio.sleep(target.random.uniform(1, 5))
            process.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))


async def fill_disk(target: Target) -> None:
    """Fill the disk of run and bus for a while."""
    if not target.disk_fills:
        await forbid_writes(target)
        return
    ballast = await asyncio.to_thread(fill, target.disk)
    target.faults["disk full"] += 1
    await asyncio.sleep(target.random.uniform(1, 5))
    await asyncio.to_thread(ballast.unlink)


async def move_clock(target: Target) -> None:
    """Move the wall clock of the run's processes by up to an hour, forwards or backwards."""
    if not target.clock.variables:
        return
    target.clock.move(target.random.randint(-CLOCK_JUMP_S, CLOCK_JUMP_S))
    target.faults["clock moved"] += 1


async def start_second(target: Target) -> None:
    """Start a second process under a name in use: it must be refused and harm nothing."""
    async with target.servers.lock:  # the first one is known by the bus
        run = target.local.run
        where = ("--run", run.name, "--directory", str(run.path.parent))
        name, arguments = target.random.choice(
            (("local", (*target.local.settings, *where[2:])), ("storage", ("--config", str(run.config))),
             ("learner", where))
        )  # fmt: skip
        first = target.local.pids(name)
        if name in HOLDS and await target.servers.holder(run.name, HOLDS[name]) not in first:
            return  # it is starting or recovering: the name is free, and the second would rightly get it
        status, output = await run_beside(
            module_command("launch", name, *arguments),
            lambda: target.local.pids(name) == first,
            without_setting_variables() | {URL_VARIABLE: target.servers.url},
        )
        if target.local.pids(name) != first:
            return  # the first one ended meanwhile by itself: its name was free
        target.faults[f"second {name}"] += 1
        waits_for_the_bus = status is None and "waiting_for" in output
        if status not in (USAGE, TEMPORARY) and not waits_for_the_bus:  # it may be away at this moment
            target.broken.append(f"a second {name} ended with {status} instead of {USAGE}: {output[-400:]}")


async def run_beside(
    command: Sequence[str], first_lives: Callable[[], bool], environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """Run a second process of a name; return its status, None if it was killed, and its output.

    It is killed when it takes too long, and as soon as the first one has ended: the successor of that would
    be refused, rightly, for it.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, preexec_fn=die_with_parent(), env=environment,
    )  # fmt: skip
    deadline = time.monotonic() + REFUSED_WITHIN_S
    ending = asyncio.create_task(process.communicate())
    killed = False
    while not (await asyncio.wait([ending], timeout=LOOK_S))[0]:
        if not killed and (time.monotonic() > deadline or not first_lives()):
            process.kill()
            killed = True
    output, _ = await ending
    return None if killed else process.returncode, output.decode(errors="replace")


def _kill(target: Target, name: str, kind: str) -> None:
    for process in target.local.find(name):
        with suppress(psutil.NoSuchProcess):
            process.kill()
            target.faults[kind] += 1


async def _suspend(target: Target, seconds: float, kind: str) -> None:
    name = target.random.choice(PARTS)
    for process in target.local.find(name):
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            target.faults[f"{kind}: {name}"] += 1
            await asyncio.sleep(seconds)
            process.resume()


RUN_FAULTS = (
    Fault(50, kill_part),
    Fault(10, kill_after_ack),
    Fault(8, kill_supervisor),
    Fault(4, power_cut),
    Fault(12, suspend_briefly),
    Fault(2, suspend_beyond_ack_wait, 3 * ACK_WAIT_S),
    Fault(6, forbid_writes),
    Fault(6, fill_disk),
    Fault(6, start_second, REFUSED_WITHIN_S),
    Fault(8, move_clock),
)
