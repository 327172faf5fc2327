"""The answers of an evaluation on their way from the evaluator to the run's directory."""

import asyncio
import json
from pathlib import Path

import pytest

from actors.evaluation.engines import RolloutEngines
from benchmarks.scripted_engine import ScriptedEngine
from bus.connection import Bus
from bus.messages import Prompt
from launch.trajectories.export import export_run
from launch.trajectories.held_out import HeldOutTrajectories
from launch.trajectories.search import TrajectoryFilter
from storage.metrics.held_out_answers import HeldOutStore, keep_held_out_answers
from tests.actors.evaluation.asked_sets import SomeRight, ask
from tests.actors.held_out import Evaluations, followed
from tests.actors.weights.publications import publish
from tests.launch.dashboard.run_on_disk import make_run
from tests.storage.serving import running, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


class OneFails(SomeRight):
    """Does not answer the first sample of the second prompt."""

    async def run(self, task, policy):
        if task.task_id == "heldout-aime-1.0":
            raise RuntimeError("the sandbox is gone")
        return await super().run(task, policy)


async def test_answers_to_the_first_prompts_are_kept_with_reward_label_and_end(
    bus: Bus, evaluations: Evaluations, tmp_path: Path
):
    run = make_run(tmp_path, "mine", steps=3)
    store = HeldOutStore(run.held_out_answers)
    engine = ScriptedEngine(lambda tokens: [5] * 8, policy_version=-1)
    await engine.start()
    async with (
        running(lambda stop: keep_held_out_answers(bus, store, stop, evaluations=20)),
        followed(bus, engine) as follower,
        evaluations.evaluator(RolloutEngines(bus, engine, follower, prompts_at_once=64), OneFails()),
    ):
        prompts = [Prompt(content=str(n), label=f"label {n}", metadata={"id": f"task-{n}"}) for n in range(3)]
        settings = {"data_set": "aime", "samples": 2, "pass_at": (1,)}
        await ask(bus, await publish(bus, 3), prompts=prompts, kept_answers=7, **settings)
        await evaluations.result()
        await until(lambda: len(store.numbers()) == 2)
        await ask(bus, await publish(bus, 4), prompts=prompts, kept_answers=0, **settings)
        await evaluations.result()
        await evaluations.settled()
        assert len(store.numbers()) == 2
        other = {**settings, "data_set": "math"}
        await ask(bus, await publish(bus, 5), prompts=prompts, kept_answers=1, **other)
        await evaluations.result()
        await until(lambda: len(store.numbers()) == 3)  # those to one prompt, however many samples it has
    await engine.close()
    path = tmp_path / "held.jsonl"
    source = HeldOutTrajectories(run)
    assert await export_run(source, TrajectoryFilter(data_set="aime"), path, asyncio.Event()) == 6
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    names = ("greedy", "reward", "end", "label", "task", "data_set", "evaluated_version")
    of_task = ("label {0}", "task-{0}", "aime", 3)
    assert [tuple(row[name] for name in names[:3]) for row in rows] == [
        (False, 0.0, "completed"), (False, 0.0, "completed"), (True, 0.0, "completed"),
        (False, None, "environment_error"), (False, 0.0, "completed"), (True, 0.0, "completed"),
    ]  # fmt: skip
    for row in rows:
        prompt = row["label"][-1]
        expected = [one.format(prompt) if isinstance(one, str) else one for one in of_task]
        assert [row[name] for name in names[3:]] == expected
    assert [(row["oldest_version"], row["newest_version"]) for row in rows if row["tokens"]] == [(3, 3)] * 5
    assert "the sandbox is gone" in rows[3]["metadata"]["failure"]
