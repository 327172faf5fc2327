"""The ranks of a learner on this host, started and watched by torchrun's elastic agent."""

import logging
import os
import signal
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
from bus.process import die_with_parent
from launch.runtime import SUPERVISOR, USAGE
from learner.config import WorldConfig

log = structlog.get_logger()
DRAIN_S = 110
"""Ranks that are told to stop may take so long: rank 0 finishes its step, and all save a checkpoint."""
NODE_RANK = "SLUICE_NODE_RANK"
"""Environment variable that tells a rank which host of its world it is on."""


class Agent(LocalElasticAgent):
    """Starts the ranks of this host, and all of them again when one dies anywhere in the world."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec, DefaultLogsSpecs(), shutdown_timeout=DRAIN_S)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """As torch does it, but what only the user can mend is not tried again."""
        result: RunResult = super()._monitor_workers(worker_group)
        for rank, failure in result.failures.items():
            log.warning("rank_failed", rank=rank, status=failure.exitcode)
            if failure.exitcode == USAGE:
                self._remaining_restarts = 0
        return result

    def ended_kindly(self) -> bool:
        """Whether every rank of this host ended with status 0."""
        ranks: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        return all(rank.proc.poll() == 0 for rank in ranks.values())


def run_world(world: WorldConfig, run: str, command: Sequence[str]) -> int:
    """Run `command` as every rank of this host until the world has ended; returns the exit status.

    SIGTERM and SIGINT are passed on, and the ranks have `DRAIN_S` to end. Raises `ConfigError` for settings
    that do not say where the world is, `WorldError` when ranks died more often than `world.restarts`, or the
    other hosts did not come.
    """
    os.environ[SUPERVISOR] = str(os.getpid())
    os.environ[NODE_RANK] = str(world.node_rank or 0)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    handler = get_rendezvous_handler(_rendezvous(world, run))
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
    try:
        result = agent.run()
    except SignalException:
        return 0 if agent.ended_kindly() else 1
    except RendezvousError as error:
        raise WorldError(f"the hosts of the learner's world did not find each other: {error}") from error
    finally:
        handler.shutdown()
    if not result.is_failed():
        return 0
    if any(failure.exitcode == USAGE for failure in result.failures.values()):
        return USAGE  # it has said why
    ranks = ", ".join(f"rank {n} with {failure.exitcode}" for n, failure in sorted(result.failures.items()))
    raise WorldError(
        f"ranks of the learner ended more often than learner.world.restarts={world.restarts} times, "
        f"last {ranks}: what they said is above"
    )


def become_rank() -> None:
    """Make this process what the agent started it for: it dies with the agent, and its number is by host.

    The agents number hosts by their addresses; a user who says --node-rank 0 wants rank 0 there.
    """
    if (ask_kernel := die_with_parent(signal.SIGKILL)) is not None:
        ask_kernel()
    if os.environ.get(SUPERVISOR, str(os.getppid())) != str(os.getppid()):
        raise WorldError("the agent that started this rank is gone")
    if NODE_RANK in os.environ:
        os.environ["RANK"] = str(
            int(os.environ[NODE_RANK]) * int(os.environ["LOCAL_WORLD_SIZE"]) + int(os.environ["LOCAL_RANK"])
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
    )


def _master(world: WorldConfig) -> tuple[str, str]:
    """Host and port of node 0. Raises `ConfigError` for what is missing or cannot be."""
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
    """This host's address as `host` sees it; asks the routing table and sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"learner.world.master: cannot reach {host}: {error}") from error
    return found
