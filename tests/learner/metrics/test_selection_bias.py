"""What is trained on compared with what was sampled, by actors' counters on a real bus and by hand."""

import asyncio
import time

import pytest

from actors.metrics.counters import report_metrics
from bus.actor_counters import SampledCounts
from bus.connection import Bus
from bus.messages import Metrics
from bus.security.permissions import COUNTERS
from learner.config.diagnostics import DiagnosticsConfig
from learner.metrics.step_metrics import STEPS, SelectionBias, StepReporter
from tests.storage.serving import until


def told(source: str, *counts: float) -> Metrics:
    return Metrics(source=source, step=0, time_s=time.time(), values=SampledCounts(*counts).metrics)


def test_figures_compare_means_of_both_sides():
    bias = SelectionBias()
    bias.hear(told("a", 5, 500, 4, 1.0))  # where it counts on from: what came before is of other steps
    bias.hear(told("a", 15, 1500, 12, 7.0))  # 10 more of 100 tokens; 8 rewards, 6.0 in all
    bias.hear(told("b", 0, 0, 0, 0.0))
    bias.hear(told("b", 10, 3000, 8, 2.0))  # 10 of 300 tokens; 8 rewards, 2.0 in all
    found = bias.figures(trajectories=4, tokens=400, reward_sum=3.0)
    assert found == {"selection/length_ratio": 100 / 200, "selection/reward_shift": 0.75 - 8.0 / 16}


def test_figures_are_of_the_latest_steps_alone():
    bias = SelectionBias()
    bias.hear(told("a"))
    bias.hear(told("a", 10, 1000, 10, 10.0))
    bias.figures(trajectories=10, tokens=1000, reward_sum=10.0)
    for step in range(1, STEPS + 1):
        bias.hear(told("a", 10 + step, 1000 + 50 * step, 10, 10.0))
        found = bias.figures(trajectories=1, tokens=100, reward_sum=0.0)
    assert found == {"selection/length_ratio": 2.0}  # and no reward was known among what was sampled


def test_an_actor_that_begins_anew_is_counted_from_its_beginning():
    bias = SelectionBias()
    bias.hear(told("a", 100, 10_000, 0, 0.0))
    bias.hear(told("a", 2, 20, 0, 0.0))
    assert bias.figures(trajectories=1, tokens=20, reward_sum=0.0) == {"selection/length_ratio": 2.0}


def test_nothing_is_said_while_a_side_has_nothing():
    bias = SelectionBias()
    assert bias.figures(trajectories=4, tokens=400, reward_sum=1.0) == {}
    bias.hear(Metrics(source="a", step=0, time_s=0.0, values={"engine/busy_s": 1.0}))
    bias.hear(told("a"))
    bias.hear(told("a", 1, 10, 1, 1.0))
    assert SelectionBias().figures(trajectories=0, tokens=0, reward_sum=0.0) == {}
    assert bias.figures(trajectories=0, tokens=0, reward_sum=0.0) != {}


@pytest.mark.nats
async def test_learner_hears_actors_and_adds_the_figures_to_those_of_its_steps(bus: Bus, monkeypatch):
    monkeypatch.setattr("actors.metrics.counters.PERIOD_S", 0.02)
    heard: list[Metrics] = []
    await bus.listen(bus.subject(COUNTERS), Metrics, heard.append)
    stop, counts = asyncio.Event(), SampledCounts(trajectories=1)
    step = {"train/trajectories": 2, "train/response_tokens_mean": 10.0, "reward/mean": 1.0}
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        reporter = StepReporter(bus, "one", tasks, DiagnosticsConfig())
        reporter.report("rl", 1, step)
        assert bus.state.metrics == step
        tasks.create_task(report_metrics(bus, source="me", look=lambda: (0, counts.metrics), stop=stop))
        await until(lambda: len(heard) >= 2)  # the learner may have heard both, and the first in any case
        counts = SampledCounts(trajectories=5, tokens=160, rewarded=4, reward_sum=1.0)
        await until(lambda: heard[-1].values["sampled/tokens"] == 160 and len(heard) > 3)
        await bus.client.flush()
        reporter.report("rl", 2, step)
        stop.set()
    found = {name: value for name, value in bus.state.metrics.items() if name.startswith("selection/")}
    assert found == {"selection/length_ratio": 10 / 40, "selection/reward_shift": 0.75}
