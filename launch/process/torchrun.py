"""The ranks of a learner on this host, started and watched by torchrun's elastic agent."""

import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import structlog
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from bus.errors import ConfigError, WorldError
from bus.process.host_limits import MemoryKills
from launch.process.ranks import NODE_RANK, SMALLER_LEARNER
from launch.process.runtime import FINAL, SUPERVISOR, TEMPORARY
from learner.config.parallel import WorldConfig

log = structlog.get_logger()
DRAIN_S = 110
"""Longest time that ranks may take to stop: rank 0 finishes its step, and all save a checkpoint."""
EXIT_BARRIER_S = 10
"""Time that an agent whose ranks are done waits for the others; one that was stopped never comes."""
PASSED_ON = (*FINAL, TEMPORARY)
"""Exit statuses of a rank that the command has itself; who started it knows when to start it again."""


class Agent(LocalElasticAgent):
    """Starts the ranks of this host, and restarts them all when a rank dies anywhere in the world."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(
            spec, DefaultLogsSpecs(), exit_barrier_timeout=EXIT_BARRIER_S, shutdown_timeout=DRAIN_S
        )
        self._memory_kills = MemoryKills()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other agents as torch does, with a store of its own for each round. torch 2.13 keeps the
        first, in which the ranks of the next round find addresses of dead ones: whether they then reach each
        other is chance."""
        handler: Any = worker_group.spec.rdzv_handler
        handler._bootstrap_store_info = handler._shared_tcp_store_server = None
        super()._rendezvous(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Watch the ranks as torch does, but start none again that said that now this would be useless."""
        result: RunResult = super()._monitor_workers(worker_group)
        for failure in result.failures.values():
            log.warning("rank_failed", local_rank=failure.local_rank, ended=self.ending(failure.exitcode))
            if failure.exitcode in PASSED_ON:
                self._remaining_restarts = 0
        return result

    def ending(self, status: int) -> str:
        return self._memory_kills.ending(status, SMALLER_LEARNER)

    def ended_kindly(self) -> bool:
        """Tell whether every rank of this host ended with status 0."""
        ranks: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        return all(rank.proc.poll() == 0 for rank in ranks.values())


def run_world(world: WorldConfig, run: str, command: Sequence[str]) -> int:
    """Run Python with the arguments `command` as every rank of this host until the world has ended.

    Returns the exit status. SIGTERM and SIGINT are passed on, and the ranks have `DRAIN_S` to end. Raises
    `ConfigError` for settings that do not say where the world is, `WorldError` when ranks died more often
    than `world.restarts`, or the other hosts did not come.
    """
    os.environ[SUPERVISOR] = str(os.getpid())
    os.environ[NODE_RANK] = str(world.node_rank or 0)
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())  # what matters of this log we say ourselves
    elastic.propagate = False
    where = _rendezvous(world, run)
    try:
        handler = get_rendezvous_handler(where)
        agent = Agent(
            WorkerSpec(
                role="learner",
                local_world_size=world.processes,
                entrypoint=sys.executable,
                args=tuple(command),
                rdzv_handler=handler,
                max_restarts=world.restarts,
            )
        )
        result = agent.run()
    except SignalException:  # the others may go on with a successor of this one
        return 0 if agent.ended_kindly() else 1
    except RendezvousError as error:
        raise WorldError(f"the hosts of the learner's world did not find each other: {error}") from error
    handler.shutdown()
    if not result.is_failed():
        return 0
    statuses = {failure.exitcode for failure in result.failures.values()}
    if said := [status for status in PASSED_ON if status in statuses]:
        return said[0]  # that rank has said why
    first = (world.node_rank or 0) * world.processes
    last = ", ".join(
        f"rank {first + failure.local_rank} with {agent.ending(failure.exitcode)}"
        for failure in result.failures.values()
    )
    raise WorldError(
        f"ranks of the learner ended more often than learner.world.restarts={world.restarts} times, "
        f"last {last}: what they said is above"
    )


def _rendezvous(world: WorldConfig, run: str) -> RendezvousParameters:
    host, port = "localhost", "0"
    if world.nodes > 1:
        host, port = _master(world)
    return RendezvousParameters(
        backend="c10d",
        endpoint=f"{host}:{port}",
        run_id=run,
        min_nodes=world.nodes,
        max_nodes=world.nodes,
        local_addr=_address_towards(host),
        is_host=not world.node_rank,
        join_timeout=world.join_timeout_s,
        read_timeout=world.join_timeout_s,  # node 0 may be started last
    )


def _master(world: WorldConfig) -> tuple[str, str]:
    """Return host and port of node 0. Raises `ConfigError` where they are missing or impossible."""
    if world.node_rank is None or world.node_rank >= world.nodes:
        raise ConfigError(
            f"learner.world.nodes={world.nodes} needs --node-rank on each, from 0 to {world.nodes - 1} "
            f"(got {world.node_rank})"
        )
    host, _, port = (world.master or "").rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(
            f"learner.world.nodes={world.nodes} needs --master HOST:PORT, a free port of node 0 "
            f"(got {world.master})"
        )
    return host, port


def _address_towards(host: str) -> str:
    """Return this host's address as `host` sees it; this asks the routing table and sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"learner.world.master: cannot reach {host}: {error}") from error
    return found
