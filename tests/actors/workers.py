"""Workers over a scripted engine, and one that dies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from actors.engines.base import Sampling
from actors.engines.scripted import ScriptedEngine
from actors.policy.policy import Policy
from actors.rewards.group_filters import load_filter
from actors.rollouts.worker import Worker
from actors.weights.follow import PolicyFollower
from bus.connection import Bus
from learner.initial.scratch_model import character_tokenizer

TOKENIZER = character_tokenizer()


def make_worker(
    bus: Bus,
    engine: ScriptedEngine,
    environment,
    *,
    max_new_tokens: int,
    keep: str = "none",
    share_after_s: float | None = 0.0,
) -> Worker:
    sampling = Sampling(max_new_tokens=max_new_tokens, stop_token_ids=(TOKENIZER.eos_token_id,))
    return Worker(
        bus,
        Policy(engine, TOKENIZER, sampling),
        environment,
        follower=PolicyFollower(bus, engine),
        keep=load_filter(keep),
        shards=2,
        name="tester",
        share_after_s=share_after_s,
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
