"""Faults that a soak injects into a run and into its bus, as two tables of functions with weights."""

import asyncio
import os
import random
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bus.child_process import die_with_parent, module_command
from bus.config import URL_VARIABLE
from bus.topology import ACK_WAIT_S
from launch.chaos.clock import ShiftedClock
from launch.chaos.disk import fill
from launch.chaos.local_run import LocalRun
from launch.chaos.servers import BusServers, Server, copy_tree
from launch.process.runtime import TEMPORARY, USAGE

PARTS = ("actors", "storage", "learner")
CONNECT_TIMEOUT_S = 5.0
REFUSED_WITHIN_S = 180.0
"""Longest time that a second process of a name may take to be refused."""
HOLDS = {"learner": "learner", "storage": "dispatcher"}
"""Role by which a process of this command has its name."""
DOWN_TIMEOUT_S = 30.0
CLOCK_JUMP_S = 3600
LINK_FAULT_S = (5.0, 30.0)


@dataclass
class Target:
    """What a soak injects faults into, and what it has injected."""

    local: LocalRun
    servers: BusServers
    disk: Path
    """Directory of the run and of the bus."""
    disk_fills: bool
    """Says whether it is a disk of its own, which may be filled."""
    clock: ShiftedClock
    outages_s: tuple[float, float]
    """Shortest and longest time for which the bus is away."""
    random: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    """Promises that were seen broken at once."""
    slow_consumers: ExitStack = field(default_factory=ExitStack)
    """Connections to the bus that read nothing of what they subscribed to."""

    def outage_s(self) -> float:
        """Draw how long the bus is away."""
        return self.random.uniform(*self.outages_s)

    def server(self) -> Server:
        """Draw a server of the bus."""
        return self.random.choice(self.servers.servers)


@dataclass(frozen=True)
class Fault:
    """A fault with its weight in the random choice."""

    weight: float
    inject: Callable[[Target], Awaitable[None]]
    longest_s: float = 10.0
    """Time that it may take; nothing that takes longer than what is left is begun."""


# --- processes of the run ---


async def kill_part(target: Target) -> None:
    """Kill the actors, storage or the learner."""
    name = target.random.choice(PARTS)
    for process in target.local.find(name):
        with suppress(psutil.NoSuchProcess):
            process.kill()
            target.faults[f"killed {name}"] += 1


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
        _signal(server, signal.SIGKILL)
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
        present = {process.pid for process in target.local.find(name)}
        if name in HOLDS and await target.servers.holder(run.name, HOLDS[name]) not in present:
            return  # it is starting or recovering: the name is free, and the second would rightly get it
        status, output = await _second(name, arguments, target.servers.url)
        if {process.pid for process in target.local.find(name)} != present:
            return  # the first one ended meanwhile by itself: its name was free
        target.faults[f"second {name}"] += 1
        if status not in (USAGE, TEMPORARY):  # the bus may be away at this moment
            target.broken.append(f"a second {name} ended with {status} instead of {USAGE}: {output[-400:]}")


async def _second(name: str, arguments: tuple[str, ...], url: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *module_command("launch", name, *arguments), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, preexec_fn=die_with_parent(),
        env=os.environ | {URL_VARIABLE: url},
    )  # fmt: skip
    try:
        async with asyncio.timeout(REFUSED_WITHIN_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
        return None, output.decode(errors="replace")
    return process.returncode, output.decode(errors="replace")


async def _suspend(target: Target, seconds: float, kind: str) -> None:
    name = target.random.choice(PARTS)
    for process in target.local.find(name):
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            target.faults[f"{kind}: {name}"] += 1
            await asyncio.sleep(seconds)
            process.resume()


# --- the bus and the way to it ---


async def kill_server(target: Target) -> None:
    """Kill one server; it starts again at once."""
    _signal(target.server(), signal.SIGKILL)
    target.faults["killed nats-server"] += 1


async def stop_bus(target: Target) -> None:
    """Take every server down for a while."""
    async with target.servers.lock:
        await _down(*target.servers.servers)
        target.faults["bus away"] += 1
        await asyncio.sleep(target.outage_s())
        _up(*target.servers.servers)


async def silence_bus(target: Target) -> None:
    """Suspend every server for a while: connections stay, and nobody answers."""
    await _silence(target, target.servers.servers, "bus silent")


async def silence_one(target: Target) -> None:
    """Suspend one server for a while."""
    await _silence(target, [target.server()], "one server silent")


async def stop_one(target: Target) -> None:
    """Take one server down for a while."""
    async with target.servers.lock:
        server = target.server()
        await _down(server)
        target.faults["one server away"] += 1
        await asyncio.sleep(target.outage_s())
        _up(server)


async def slow_link(target: Target) -> None:
    """Carry little for a while."""
    rate = target.random.choice((20e3, 100e3, 1e6))
    await _on_link(target, "slow link", lambda server: setattr(server.link, "bytes_per_s", rate))


async def late_link(target: Target) -> None:
    """Carry everything late for a while."""
    delay_s = target.random.uniform(0.05, 0.5)
    await _on_link(target, "late link", lambda server: setattr(server.link, "delay_s", delay_s))


async def stall_link(target: Target) -> None:
    """Carry nothing for a while, and close nothing."""
    await _on_link(target, "link stalled", lambda server: server.link.flows.clear())


async def drop_connections(target: Target) -> None:
    """Close every connection."""
    for server in target.servers.servers:
        server.link.drop()
    target.faults["connections dropped"] += 1


async def garble_link(target: Target) -> None:
    """Replace a few pieces of the traffic by random bytes, then close every connection."""
    for server in target.servers.servers:
        server.link.garble_pieces = target.random.randint(1, 4)
    await asyncio.sleep(1)
    for server in target.servers.servers:
        server.link.heal()
        server.link.drop()
    target.faults["link garbled"] += 1


async def roll_back_bus(target: Target) -> None:
    """Put a server's directory back to what it was some seconds ago."""
    async with target.servers.lock:
        server = target.server()
        store = server.directory / "jetstream"
        before = target.disk / "before"
        _signal(server, signal.SIGSTOP)  # as a snapshot of the disk would have it
        try:
            await asyncio.to_thread(copy_tree, store, before)
        finally:
            _signal(server, signal.SIGCONT)
        await asyncio.sleep(target.random.uniform(5, 20))
        await _down(server)
        await asyncio.to_thread(copy_tree, before, store)
        await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)
        target.faults["bus directory rolled back"] += 1
        _up(server)


async def damage_bus(target: Target) -> None:
    """Truncate a block, flip a bit or wipe the directory, as Jepsen did when it broke NATS 2.12.1."""
    how = target.random.choice(["truncated", "flipped", "wiped"])
    async with target.servers.lock:
        server = target.server()
        await _down(server)
        store = server.directory / "jetstream"
        blocks = sorted(path for path in store.rglob("*.blk") if path.stat().st_size > 0)
        if how == "wiped":
            await asyncio.to_thread(shutil.rmtree, store, ignore_errors=True)
        elif blocks:
            damage(target.random.choice(blocks), how, target.random)
        target.faults[f"bus directory {how}"] += 1
        _up(server)


async def connect_slow_consumer(target: Target) -> None:
    """Connect a client that subscribes to every message of the run and reads none."""
    subject = f"sluice.{target.local.run.name}.>"
    with suppress(OSError):
        client = await asyncio.to_thread(_slow_consumer, target.server().link.port, subject)
        target.slow_consumers.enter_context(closing(client))
        target.faults["slow consumer"] += 1


async def kill_leader(target: Target) -> None:
    """Kill the server that leads the run's stream of trajectories; it starts again after a while."""
    async with target.servers.lock:
        leader = await target.servers.leader(target.local.run.name)
        if leader is None:
            target.faults["no leader found"] += 1
            return
        await _down(leader)
        target.faults["killed leader"] += 1
        await asyncio.sleep(5)
        _up(leader)


async def _on_link(target: Target, kind: str, change: Callable[[Server], None]) -> None:
    """Change every link for a while."""
    for server in target.servers.servers:
        change(server)
    target.faults[kind] += 1
    await asyncio.sleep(target.random.uniform(*LINK_FAULT_S))
    for server in target.servers.servers:
        server.link.heal()


async def _silence(target: Target, servers: list[Server], kind: str) -> None:
    async with target.servers.lock:
        for server in servers:
            _signal(server, signal.SIGSTOP)
        target.faults[kind] += 1
        try:
            await asyncio.sleep(target.outage_s())
        finally:
            for server in servers:
                _signal(server, signal.SIGCONT)


async def _down(*servers: Server) -> None:
    """Kill servers, and return when they are down."""
    for server in servers:
        server.up.clear()
        _signal(server, signal.SIGKILL)
    async with asyncio.timeout(DOWN_TIMEOUT_S):
        for server in servers:
            await server.down.wait()


def _up(*servers: Server) -> None:
    for server in servers:
        server.up.set()


def _signal(server: Server, number: signal.Signals) -> None:
    if server.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(server.pid, number)


def _slow_consumer(port: int, subject: str) -> socket.socket:
    """Connect a client that subscribes and never reads again; its receive buffer is small."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(CONNECT_TIMEOUT_S)
    client.connect(("127.0.0.1", port))
    client.recv(4096)
    client.sendall(f'CONNECT {{"verbose":false}}\r\nSUB {subject} 1\r\n'.encode())
    return client


def damage(path: Path, how: str, draw: random.Random) -> None:
    """Cut a file (`truncated`), or flip one of its bits (`flipped`)."""
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


RUN_FAULTS = (
    Fault(60, kill_part),
    Fault(8, kill_supervisor),
    Fault(4, power_cut),
    Fault(12, suspend_briefly),
    Fault(2, suspend_beyond_ack_wait, 3 * ACK_WAIT_S),
    Fault(6, forbid_writes),
    Fault(6, fill_disk),
    Fault(6, start_second, REFUSED_WITHIN_S),
    Fault(8, move_clock),
)
LINK_FAULTS = (
    Fault(10, slow_link, LINK_FAULT_S[1]),
    Fault(8, late_link, LINK_FAULT_S[1]),
    Fault(6, stall_link, LINK_FAULT_S[1]),
    Fault(25, drop_connections),
    Fault(8, garble_link),
    Fault(4, connect_slow_consumer),
)
BUS_FAULTS = (*LINK_FAULTS, Fault(25, kill_server), Fault(8, roll_back_bus, 30.0), Fault(10, damage_bus))
CLUSTER_FAULTS = (*LINK_FAULTS, Fault(15, kill_server), Fault(4, damage_bus))


def bus_faults(target: Target) -> tuple[Fault, ...]:
    """Return the faults of this bus; those of a cluster leave most of its servers as they are."""
    longest_s = target.outages_s[1]
    if len(target.servers.servers) > 1:
        outages = (
            Fault(3, stop_bus, longest_s),
            Fault(5, silence_one, longest_s),
            Fault(5, stop_one, longest_s),
        )
        return (*CLUSTER_FAULTS, *outages)
    return (*BUS_FAULTS, Fault(6, stop_bus, longest_s), Fault(6, silence_bus, longest_s))


async def inject_one(target: Target, table: tuple[Fault, ...], left_s: float) -> None:
    """Inject one fault, drawn at random among those that are over within `left_s`; most take no time."""
    possible = [fault for fault in table if fault.longest_s <= max(left_s, 10.0)]
    [chosen] = target.random.choices(possible, weights=[fault.weight for fault in possible])
    await chosen.inject(target)
