"""An actor process that is a further node of an engine: it takes no leases, and runs ranks of the server."""

import asyncio
import tempfile
from pathlib import Path

from actors.engines.fleet.engine_claims import EngineClaims
from actors.engines.fleet.engine_nodes import FollowingNode
from actors.engines.fleet.gpu_plan import gpu_plan
from actors.evaluating_actor import AnnouncedPolicy
from actors.metrics.counters import report_actor
from actors.run_end import stop_when_done
from actors.settings.actors import ActorsConfig
from actors.weights.first_policy import actor_name, first_policy
from actors.weights.follow import obtain_model
from bus.connection import Bus
from bus.connection.status import Activity


async def run_engine_node(bus: Bus, actors: ActorsConfig, logs: Path, stop: asyncio.Event) -> None:
    """Run this node's ranks whenever node 0 leads the engine, until `stop` or the end of the run. Raises as
    `FollowingNode.run`."""
    engine, policy, finished = actors.engine.servers, AnnouncedPolicy(bus), asyncio.Event()
    manifest = await first_policy(bus, actors.patience_s, stop)
    if manifest is None:
        return
    with tempfile.TemporaryDirectory(prefix="sluice-model-") as directory:
        model = await obtain_model(bus, manifest, Path(directory), patience_s=actors.patience_s, stop=stop)
        if model is None:
            return
        log_file = logs / f"engine-node-{engine.node_rank}-{actor_name()}.log"
        first_gpu = gpu_plan(actors).rollouts[0]
        node = FollowingNode(bus, engine, model, log_file, first_gpu=first_gpu)
        async with EngineClaims.open(bus, actor_name(), engine), asyncio.TaskGroup() as tasks:
            tasks.create_task(report_actor(bus, lambda: Activity(node.doing, wait="engine"), finished))
            tasks.create_task(policy.run(finished))
            tasks.create_task(stop_when_done(lambda: policy.stage, str, stop))
            try:
                await node.run(stop)
            finally:
                finished.set()
