"""An actor with its parts over a scripted engine."""

import asyncio

from actors.engines.base import Sampling
from actors.environments.single_turn import SingleTurn
from actors.policy.policy import Policy
from actors.rewards.group_filters import load_filter
from actors.rollouts.worker import Worker, WorkerParts
from actors.settings.actors import SingleTurnConfig
from actors.weights.follow import PolicyFollower
from bus.codec import encode
from bus.messages import GroupRejected
from bus.streams.consume import Inbox
from bus.streams.publish import Publisher
from bus.streams.received import understood
from bus.trajectory import TrajectoryBatch
from learner.initial.scratch_model import character_tokenizer

TIMEOUT_S = 60
TOKENIZER = character_tokenizer()


def answer_with(text):
    """An engine's script that always answers `text` and ends."""
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"] + [TOKENIZER.eos_token_id]
    return lambda tokens: ids


class Actor:
    """A worker on a scripted engine, run for as long as a test needs it."""

    def __init__(self, bus, engine, environment=None, keep="none", **parts):
        self.bus = bus
        sampling = Sampling(max_new_tokens=8, stop_token_ids=(TOKENIZER.eos_token_id,))
        self.follower = PolicyFollower(bus, engine)
        self.worker = Worker(
            bus,
            Policy(engine, TOKENIZER, sampling),
            environment or SingleTurn.from_config(SingleTurnConfig(reward="exact")),
            WorkerParts(**parts),
            follower=self.follower,
            keep=load_filter(keep),
            shards=2,
            name="tester",
        )

    async def roll_out(self, *leases, result):
        """Publish the leases, work until each has a result on its subject, and stop."""
        publisher, stop = Publisher(self.bus), asyncio.Event()
        for lease in leases:
            subject = self.bus.subject("tasks", "rollout")
            await publisher.publish(subject, encode(lease), message_id=f"lease-{lease.lease_id}")
        working = asyncio.create_task(self.worker.run(stop, groups_at_once=4))
        stream, durable, expected = result
        inbox, found = Inbox(self.bus, stream, durable), []
        async with asyncio.timeout(TIMEOUT_S):
            while len(found) < len(leases):
                found += [r.message for r in await understood(await inbox.take(8), self.bus, expected)]
            stop.set()
            await working
        return found

    async def leases_left(self):
        return (await self.bus.js.stream_info(self.bus.topology.stream("TASKS"))).state.messages


GROUPS = ("TRAJECTORIES", "shard-0", TrajectoryBatch)
REJECTED = ("OUTCOMES", "dispatcher", GroupRejected)


def leaf(error: BaseException) -> str:
    while isinstance(error, ExceptionGroup):
        [error] = error.exceptions
    return str(error)
