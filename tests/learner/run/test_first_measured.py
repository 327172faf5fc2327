"""Tests when the version that reinforcement learning begins with is measured."""

import asyncio
from dataclasses import replace

import pytest

from bus.codec import encode
from bus.evaluation_messages import EvaluationResult, EvaluationTask
from bus.messages import BlobRef, Status
from bus.streams.publish import Publisher
from learner.progress.progress import Progress
from learner.run import service
from storage.settings.evaluation import EvaluationConfig
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
                oldest_version=policy.policy_version, newest_version=policy.policy_version,
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


async def test_a_version_whose_evaluation_a_stop_ended_is_measured_again_by_the_next_start(bus, tmp_path):
    asked = asyncio.Queue()
    await bus.put("heldout", BLOB)
    await bus.listen(bus.subject("tasks", "evaluation"), EvaluationTask, asked.put_nowait)
    async with mini_run(bus, tmp_path) as run, asyncio.timeout(LIMIT_S):
        await run.train_and_die(2)
        before = [asked.get_nowait().policy for _ in range(asked.qsize())]
        assert [policy.policy_version for policy in before] == [0, 1]
        stop = asyncio.Event()
        settings = replace(run.settings(), evaluation=EvaluationConfig(every_versions=2))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(service.run(bus, settings, run.demonstrations, stop))
            again = await asked.get()
            stop.set()
    assert again.policy.policy_version == 1
    assert again.policy.incarnation != before[1].incarnation


def test_only_what_was_to_be_measured_and_was_not_is_measured_again():
    measured = {"1": (0.5, 0.5), "41": (0.5, 0.5)}
    begun = Progress(stage="rl", trains_from=1, evaluations=measured)
    assert [replace(begun, step=step).lacks_evaluation(20) for step in (0, 19, 20, 40, 59, 60)] == [
        False, False, True, False, False, True,
    ]  # fmt: skip
    assert not replace(begun, step=20).lacks_evaluation(0)
    assert not replace(begun, step=20, stage="warmup").lacks_evaluation(20)
