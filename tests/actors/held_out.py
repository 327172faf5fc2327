"""What tests of evaluations share: somebody who asks for them, and an environment that remembers."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

from safetensors.torch import save

from actors.engines.base import Sampling
from actors.episodes.episode import Episode
from actors.evaluation.evaluator import Evaluator, EvaluatorParts
from actors.policy.other_engines import OtherEngines
from actors.weights.follow import PolicyFollower
from bus.codec import encode
from bus.evaluation_messages import EvaluationResult, EvaluationTask, PromptSet
from bus.messages import PolicyManifest, Prompt
from bus.streams.blob_store import put_blob
from bus.streams.publish import Publisher
from learner.initial.scratch_model import character_tokenizer

TIMEOUT_S = 60
TOKENIZER = character_tokenizer()
SAMPLED = Sampling(max_new_tokens=12)
PROMPTS = 4


class Recording:
    """Asks once; the reward is 1. Remembers the versions of all tokens, and what `meanwhile` is to happen."""

    trajectories_per_episode = 1

    def __init__(self, meanwhile=None):
        self.runs = self.busy = self.most_busy = 0
        self.versions = []
        self._meanwhile = meanwhile

    async def run(self, task, policy):
        self.runs += 1
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        try:
            if self._meanwhile is not None:
                await self._meanwhile(self.runs)
            policy = policy.fresh(task.task_id)
            await policy.chat(task.messages)
        finally:
            self.busy -= 1
        [trajectory] = trajectories = policy.trajectories(1.0)
        self.versions += trajectory.policy_versions[trajectory.policy_versions >= 0].tolist()
        return Episode(trajectories=trajectories)


class Evaluations:
    """Asks for evaluations as a learner does, and has evaluators answer."""

    def __init__(self, bus):
        self.bus = bus
        self.results = asyncio.Queue()

    async def listen(self):
        await self.bus.listen(
            self.bus.subject("events", "evaluation"), EvaluationResult, self.results.put_nowait
        )

    async def ask(self, manifest, prompts=PROMPTS):
        held_out = PromptSet(prompts=tuple(Prompt(content=str(n)) for n in range(prompts)))
        ref = await put_blob(self.bus, Publisher(self.bus), encode(held_out), "heldout")
        task, name = EvaluationTask(policy=manifest, prompts=ref), f"{manifest}-{prompts}"
        await Publisher(self.bus).publish(
            self.bus.subject("tasks", "evaluation"), encode(task), message_id=name
        )

    async def result(self):
        async with asyncio.timeout(TIMEOUT_S):
            return await self.results.get()

    async def settled(self):
        """Return when no task is left."""
        await until(self.no_task_is_left)

    async def no_task_is_left(self):
        return (await self.bus.js.stream_info(self.bus.topology.stream("TASKS"))).state.messages == 0

    async def handed_out(self, times):
        info = await self.bus.js.consumer_info(self.bus.topology.stream("TASKS"), "evaluation")
        return info.delivered.consumer_seq >= times

    @asynccontextmanager
    async def evaluator(
        self, engines, environment, *, fails=False, opponents=(), further=(), agents=(), endpoints=(),
        finish_within_s=30.0,
    ):  # fmt: skip
        """An evaluator at work, its end awaited; yields what stops it, and its task."""
        parts = EvaluatorParts(
            sampled=SAMPLED, greedy=replace(SAMPLED, temperature=0.0), endpoints=dict(endpoints),
            others=OtherEngines(opponents=dict(opponents), further=dict(further), agents=dict(agents)),
            finish_within_s=finish_within_s,
        )  # fmt: skip
        working = Evaluator(self.bus, engines, TOKENIZER, environment, parts)
        stop = asyncio.Event()
        running = asyncio.create_task(working.run(stop))
        try:
            yield stop, running
        finally:
            stop.set()
            await asyncio.wait([running], timeout=TIMEOUT_S)
            assert running.done(), "the evaluator did not end"
            assert working.doing == ""
        assert running.exception() is None or fails


async def until(condition):
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110 - servers and engines have no event for it
            await asyncio.sleep(0.02)


@asynccontextmanager
async def followed(bus, engine):
    follower, stop = PolicyFollower(bus, engine), asyncio.Event()
    running = asyncio.create_task(follower.run(stop))
    try:
        yield follower
    finally:
        stop.set()
        await asyncio.wait([running], timeout=TIMEOUT_S)
        running.result()


async def published(bus, version, model):
    """Weights that a real engine can load."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    snapshot = await put_blob(bus, Publisher(bus), save(tensors), "weights", version)
    manifest = PolicyManifest(
        policy_version=version, incarnation="one", snapshot=snapshot, model=snapshot, stage="rl"
    )
    await bus.put("policy", manifest)
    await bus.notify(bus.subject("notice", "policy"), manifest)
    return manifest
