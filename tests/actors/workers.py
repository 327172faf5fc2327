"""Workers over a scripted engine, and one that dies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from actors.engines.base import Sampling
from actors.policy.policy import Policy
from actors.rewards.group_filters import load_filter
from actors.rollouts.worker import Worker, WorkerParts
from actors.weights.follow import PolicyFollower
from benchmarks.scripted_engine import ScriptedEngine
from bus.connection import Bus
from learner.initial.scratch_model import character_tokenizer

TOKENIZER = character_tokenizer()


def make_worker(
    bus: Bus, engine: ScriptedEngine, environment, *, max_new_tokens: int, keep: str = "none", **parts: object
) -> Worker:
    """A worker that shares finished rollouts at once, unless its parts say otherwise."""
    sampling = Sampling(max_new_tokens=max_new_tokens, stop_token_ids=(TOKENIZER.eos_token_id,))
    return Worker(
        bus,
        Policy(engine, TOKENIZER, sampling),
        environment,
        WorkerParts(**{"share_after_s": 0.0, **parts}),
        follower=PolicyFollower(bus, engine),
        keep=load_filter(keep),
        shards=2,
        name="tester",
    )


@asynccontextmanager
async def killed_at_the_end(worker: Worker) -> AsyncIterator[None]:
    """At work until its process dies: nothing is handed back."""
    task = asyncio.create_task(worker.run(asyncio.Event(), groups_at_once=4))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
