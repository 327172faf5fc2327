"""The bound on figures that data name."""

import asyncio

import pytest

from bus.connection.bus import Bus
from learner.config.diagnostics import DiagnosticsConfig
from learner.metrics.step_metrics import StepReporter


@pytest.mark.nats
async def test_sources_that_change_with_each_step_get_no_figures_without_end(bus: Bus, monkeypatch):
    monkeypatch.setattr("learner.metrics.step_metrics.MOST_FIGURES", 3)
    told = []
    own = {"reward/mean": 0.5, "train/trajectories": 2, "train/response_tokens_mean": 1.0}
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        reporter = StepReporter(bus, "one", tasks, DiagnosticsConfig())
        for step, names in enumerate((["reward_part/right", "source_reward/a"], ["source_reward/b"], "cd")):
            named = [name if "/" in name else f"source_reward/{name}" for name in names]
            reporter.report("rl", step, own | dict.fromkeys([*named, "source_reward/a"], 1.0))
            told.append(bus.state.metrics.keys() - own.keys())
    first = {"reward_part/right", "source_reward/a"}
    assert told == [
        first,
        {"source_reward/a", "source_reward/b"},
        {"source_reward/a", "train/figures_left_out"},
    ]
    assert bus.state.metrics["train/figures_left_out"] == 2
