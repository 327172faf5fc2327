"""Tests when the version that reinforcement learning begins with is measured."""

import asyncio
from dataclasses import replace

import pytest

from bus.codec import encode
from bus.evaluation_messages import EvaluationResult, EvaluationTask
from bus.messages import BlobRef, Status
from bus.streams.publish import Publisher
from learner.run import service
from tests.learner.mini_run import LIMIT_S, mini_run

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.usefixtures("in_process")]
BLOB = BlobRef(subject="none", chunks=1, size_bytes=1, digest="")


@pytest.mark.parametrize(("engines", "steps", "version"), [("rollout", 0, 1), ("own", 4, 5)])
async def test_no_step_is_trained_before_engines_that_would_take_its_weights_have_measured_those_before(
    bus, tmp_path, engines, steps, version
):
    asked, said = asyncio.Queue(), asyncio.Queue()

    async def answer():
        while True:
            policy = (await asked.get()).policy
            result = EvaluationResult(
                policy_version=policy.policy_version, incarnation=policy.incarnation,
                sampled=0.5, greedy=0.5, prompts=2, seconds=1.0,
            )  # fmt: skip
            await Publisher(bus).publish(
                bus.subject("events", "evaluation"), encode(result), message_id=f"{policy.policy_version}"
            )

    await bus.put("heldout", BLOB)
    await bus.listen(bus.subject("tasks", "evaluation"), EvaluationTask, asked.put_nowait)
    await bus.listen(bus.subject("status", "learner"), Status, said.put_nowait)
    async with mini_run(bus, tmp_path) as run, asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        settings = replace(run.settings(), evaluated_on=engines)
        training = tasks.create_task(service.run(bus, settings, run.demonstrations, asyncio.Event()))
        while not (doing := (await said.get()).doing).startswith("waiting for the evaluation"):
            pass
        what, _, _ = doing.partition(":")  # behind it: how far the groups of the next step are
        assert what == f"waiting for the evaluation of version {version}"
        assert len(run.steps()) == steps
        answering = tasks.create_task(answer())
        progress = await training
        answering.cancel()
    assert (progress.stage, progress.step) == ("done", 4)
    assert progress.evaluations.keys() == {"0", "1", "5"}
