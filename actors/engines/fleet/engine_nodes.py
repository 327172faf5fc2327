"""An engine of several nodes: node 0 leads it, the others run their ranks, and all begin anew together."""

import asyncio
import platform
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import structlog

from actors.engines.sglang.server.server import OwnServer
from actors.settings.engines import SglangEngineConfig
from bus.connection import Bus
from bus.device_messages import BEAT_S, Beats
from bus.engine_nodes import EngineNode, node_key
from bus.errors import ConfigError, EngineError, EngineNodeLostError, leaves
from bus.server.nats_server import port_problem
from bus.waiting import cancelled, set_within

log = structlog.get_logger()
LAPSE_S = 15.0
"""A node whose key is not set for so long counts as gone."""
SILENCE_S = 3 * BEAT_S
"""Once an engine has failed, a node whose key is not set for so long is what it failed of."""


class NodeRecords:
    """What the nodes of one engine say of themselves on the bus."""

    def __init__(self, bus: Bus, engine: SglangEngineConfig) -> None:
        self.process = secrets.token_hex(8)
        self._bus = bus
        self._engine = engine
        self._beats = {rank: Beats(LAPSE_S) for rank in range(engine.nodes)}

    async def say(self, engine: str, *, ended: str = "", shared_file: str = "") -> None:
        record = EngineNode(
            process=self.process, engine=engine, host=platform.node(), ended=ended, shared_file=shared_file
        )
        await self._bus.put(self._key(self._engine.node_rank), record)

    async def of(self, rank: int) -> EngineNode | None:
        """Return what a node says; None where it says nothing any more."""
        began = time.monotonic()
        found = await self._bus.get(self._key(rank), EngineNode)
        if found is None:
            return None
        if time.monotonic() - began > BEAT_S:  # the bus was away, for the other node as well
            self._beats[rank].unknown()
        return found[0] if self._beats[rank].alive(found[1]) else None

    async def revision(self, rank: int) -> int:
        """Return how often a node has set its key, as a number that only grows."""
        found = await self._bus.get(self._key(rank), EngineNode)
        return found[1] if found else 0

    def _key(self, rank: int) -> str:
        return node_key(self._engine.rendezvous, rank)


class LeadingNode:
    """Node 0 of an engine: it waits for the other nodes, and knows when one of them is gone."""

    def __init__(self, bus: Bus, engine: SglangEngineConfig) -> None:
        self.starting = ""
        """What node 0 waits for before the engine may start, in words; empty once all nodes have joined."""
        self._engine = engine
        self._records = NodeRecords(bus, engine)
        self._nodes: dict[int, EngineNode] = {}
        """What the other nodes said when they joined."""
        self._told = ""
        """What the engine was told of nodes that are gone, and says itself."""

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        """Lead an engine inside, which other nodes may join from now on. Raises `EngineNodeLostError`, which
        names nodes that are gone, where an engine fails that all of them had joined, and `EngineError` where
        another process has the port of the rendezvous."""
        _refuse_taken_port(self._engine.rendezvous)
        with _shared_file(self._engine) as shared_file:
            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(self._beat(shared_file))
                try:
                    yield
                except* EngineError as failed:
                    if len(self._nodes) < self._engine.nodes - 1:
                        raise
                    gone, reason = await self._gone(SILENCE_S), str(next(leaves(failed)))
                    named = reason if gone in ("", self._told) else f"{gone}: {reason}"
                    raise EngineNodeLostError(named) from failed
                finally:
                    await cancelled(beating)
                    await self._records.say("", ended="node 0 has left")

    async def start(self) -> None:
        """Return when all nodes have joined. Raises `EngineError` for those that do not in time, or end."""
        deadline = time.monotonic() + self._engine.start_timeout_s
        where = f"the engine at {self._engine.rendezvous}"
        while missing := [rank for rank in range(1, self._engine.nodes) if not await self._has_joined(rank)]:
            self.starting = f"waiting for node {', '.join(map(str, missing))} of {where}"
            if time.monotonic() > deadline:
                raise EngineError(
                    f"waited actors.engine.start_timeout_s={self._engine.start_timeout_s:g} for node "
                    f"{missing[0]} of {where}: run `launch actors` there with the same settings of "
                    f"actors.engine and --actors.engine.node-rank {missing[0]}"
                )
            await asyncio.sleep(BEAT_S / 2)
        self.starting = ""

    @asynccontextmanager
    async def watched(self, fail: Callable[[str], None]) -> AsyncIterator[None]:
        """Inside, call `fail` with the reason while another node is gone."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(fail))
            try:
                yield
            finally:
                await cancelled(watching)

    async def _beat(self, shared_file: str) -> None:
        while True:
            await self._records.say(self._records.process, shared_file=shared_file)
            await asyncio.sleep(BEAT_S)

    async def _has_joined(self, rank: int) -> bool:
        found = await self._records.of(rank)
        if found is None or found.engine != self._records.process:
            return False
        if found.ended:
            raise EngineError(f"node {rank} ({found.host}): {found.ended}")
        self._nodes[rank] = found
        return True

    async def _watch(self, fail: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if gone := await self._gone(0.0):
                self._told = gone
                fail(gone)

    async def _gone(self, silence_s: float) -> str:
        """Return which nodes are gone, and why; those too that are silent for `silence_s`, unless that is
        0."""
        before = {rank: await self._records.revision(rank) for rank in self._nodes} if silence_s else {}
        await asyncio.sleep(silence_s)
        reasons = []
        for rank, joined in self._nodes.items():
            found = await self._records.of(rank)
            if found is not None and found.ended:
                reasons.append(f"node {rank} ({found.host}): {found.ended}")
            elif found is None or before.get(rank) == await self._records.revision(rank):
                reasons.append(f"node {rank} ({joined.host}) is gone")
            elif found.process != joined.process:
                reasons.append(f"node {rank} ({found.host}) was started again")
        return "; ".join(reasons)


def _refuse_taken_port(rendezvous: str) -> None:
    """Raise `EngineError` where another process of this host has the port; SGLang's ranks would wait for each
    other there, and end in a traceback."""
    if reason := port_problem("", int(rendezvous.rpartition(":")[2])):
        raise EngineError(
            f"actors.engine.rendezvous={rendezvous}: node 0 cannot have this port on {platform.node()} "
            f"({reason}): end the process that has it, or choose another port on all nodes"
        )


@contextmanager
def _shared_file(engine: SglangEngineConfig) -> Iterator[str]:
    """Make a file in the directory that all nodes share, by which the others see that they do."""
    if engine.update != "disk" or engine.weights_directory is None:
        yield ""
        return
    engine.weights_directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=engine.weights_directory, prefix="sluice-node-0-") as file:
        yield file.name


class FollowingNode:
    """Any other node of an engine: it runs the server's ranks of its host whenever node 0 leads one."""

    def __init__(
        self, bus: Bus, engine: SglangEngineConfig, model: Path, log_file: Path, *, first_gpu: int
    ) -> None:
        self.doing = "waiting for node 0 of its engine"
        self._engine = engine
        self._model = model
        self._log_file = log_file
        self._first_gpu = first_gpu
        self._records = NodeRecords(bus, engine)
        self._last = ""
        """Name of the engine that the node was part of before."""

    async def run(self, stop: asyncio.Event) -> None:
        """Be part of one engine after the other until `stop`. Raises `EngineError` where node 0 leads none
        for `start_timeout_s`, and `ConfigError` where the two share no directory."""
        while (head := await self._led(stop)) is not None:
            self._last = head.process
            self.doing = f"running node {self._engine.node_rank} of the engine at {self._engine.rendezvous}"
            reason = await self._take_part(head, stop)
            log.warning("engine_node_ended", node=self._engine.node_rank, reason=reason)

    async def _led(self, stop: asyncio.Event) -> EngineNode | None:
        """Return what node 0 says once it leads an engine that is new here; None on `stop`."""
        limit_s = self._engine.start_timeout_s
        deadline = time.monotonic() + limit_s
        self.doing = "waiting for node 0 of its engine"
        while not stop.is_set():
            head = await self._records.of(0)
            if head is not None and not head.ended and head.process != self._last:
                return head
            if time.monotonic() > deadline:
                raise EngineError(
                    f"waited actors.engine.start_timeout_s={limit_s:g} for node 0 of the engine at "
                    f"{self._engine.rendezvous}: run `launch actors` there with the same settings of "
                    "actors.engine and --actors.engine.node-rank 0, for the same run"
                )
            await set_within(stop, BEAT_S / 2)
        return None

    async def _take_part(self, head: EngineNode, stop: asyncio.Event) -> str:
        """Run this node's ranks as long as node 0 leads the engine; return why that is over."""
        server = OwnServer(self._engine, self._model, self._log_file, self._first_gpu)
        reason = "it was stopped"
        try:
            self._refuse_other_directory(head)
            await self._records.say(head.process)
            client = await server.start()
            await client.close()  # node 0 has the only server that answers
            while not stop.is_set():
                if ended := await server.ended(within_s=BEAT_S):
                    reason = ended
                    break
                now = await self._records.of(0)
                if now is None or now.process != head.process or now.ended:
                    reason = "node 0 leads this engine no more"
                    break
                await self._records.say(head.process)
        except ConfigError as error:
            reason = str(error)
            raise
        finally:
            await server.kill()
            await self._records.say(head.process, ended=reason)
        return reason

    def _refuse_other_directory(self, head: EngineNode) -> None:
        if head.shared_file and not Path(head.shared_file).exists():
            raise ConfigError(
                f"actors.engine.weights_directory={self._engine.weights_directory}: there is no "
                f"{head.shared_file}, which node 0 made on {head.host}: name a directory that all nodes of "
                "the engine share, or set actors.engine.update=tensor"
            )
