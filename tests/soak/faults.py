"""Faults that a soak injects: what they strike, and the random choice among them."""

import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bus.topology import trajectories_streams
from soak.clock import ShiftedClock
from soak.local_run import LocalRun
from soak.lost_with_bus import LostWithBus
from soak.servers import BusServers, Server


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
    account: LostWithBus
    shards: int
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

    def stream(self) -> str:
        """Draw a stream of trajectories: each shard has its own."""
        return self.random.choice(trajectories_streams(self.shards))


@dataclass(frozen=True)
class Fault:
    """A fault with its weight in the random choice."""

    weight: float
    inject: Callable[[Target], Awaitable[None]]
    longest_s: float = 10.0
    """Time that it may take; nothing that takes longer than what is left is begun."""


def send_signal(server: Server, number: signal.Signals) -> None:
    """Send a signal to a server, unless it is down."""
    if server.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(server.pid, number)


async def inject_one(target: Target, table: tuple[Fault, ...], left_s: float) -> None:
    """Inject one fault, drawn at random among those that are over within `left_s`; most take no time."""
    possible = [fault for fault in table if fault.longest_s <= max(left_s, 10.0)]
    [chosen] = target.random.choices(possible, weights=[fault.weight for fault in possible])
    await chosen.inject(target)
