"""Faults of the bus and of the way to it: outages, links, damaged directories, clients that read nothing."""

import asyncio
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from soak.faults import Fault, Target, send_signal
from soak.servers import Server, copy_tree

CONNECT_TIMEOUT_S = 5.0
DOWN_TIMEOUT_S = 30.0
LINK_FAULT_S = (5.0, 30.0)


async def kill_server(target: Target) -> None:
    """Kill one server; it starts again at once."""
    send_signal(target.server(), signal.SIGKILL)
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
        send_signal(server, signal.SIGSTOP)  # as a snapshot of the disk would have it
        try:
            await asyncio.to_thread(copy_tree, store, before)
        finally:
            send_signal(server, signal.SIGCONT)
        await asyncio.sleep(target.random.uniform(5, 20))
        await target.account.take_account()
        await _down(server)
        await asyncio.to_thread(copy_tree, before, store)
        target.account.bus_damaged()
        await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)
        target.faults["bus directory rolled back"] += 1
        _up(server)


async def damage_bus(target: Target) -> None:
    """Truncate a block, flip a bit or wipe the directory, as Jepsen did when it broke NATS 2.12.1."""
    how = target.random.choice(["truncated", "flipped", "wiped"])
    async with target.servers.lock:
        server = target.server()
        await target.account.take_account()
        await _down(server)
        target.account.bus_damaged()
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


async def kill_leader(target: Target) -> bool:
    """Kill the server that leads a stream of the run's trajectories; it starts again after a while.

    Returns whether there was one: other faults leave a cluster without a leader for some time."""
    async with target.servers.lock:
        leader = await target.servers.leader(target.local.run.name, target.stream())
        if leader is None:
            return False
        await _down(leader)
        target.faults["killed leader"] += 1
        await asyncio.sleep(5)
        _up(leader)
    return True


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
            send_signal(server, signal.SIGSTOP)
        target.faults[kind] += 1
        try:
            await asyncio.sleep(target.outage_s())
        finally:
            for server in servers:
                send_signal(server, signal.SIGCONT)


async def _down(*servers: Server) -> None:
    """Kill servers, and return when they are down."""
    for server in servers:
        server.up.clear()
        send_signal(server, signal.SIGKILL)
    async with asyncio.timeout(DOWN_TIMEOUT_S):
        for server in servers:
            await server.down.wait()


def _up(*servers: Server) -> None:
    for server in servers:
        server.up.set()


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
