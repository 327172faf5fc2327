"""The numbers that environments give with their episodes are recorded as averages."""

import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.environments.single_turn import SingleTurn
from actors.episodes.episode import Episode, FailedEpisode
from actors.metrics import episode_metrics
from actors.metrics.episode_metrics import EpisodeMetrics
from actors.rewards.scoring.scorers import Scorer
from benchmarks.scripted_engine import ScriptedEngine
from tests.actors.rollouts.whole_actor import GROUPS, Actor, answer_with
from tests.factories import make_lease


def test_each_number_is_averaged_over_the_latest_episodes_that_have_it(monkeypatch):
    monkeypatch.setattr(episode_metrics, "RECENT", 2)
    kept = EpisodeMetrics()
    kept.add([Episode((), {"tools/calls": 9}), FailedEpisode("timeout", "too slow")])
    kept.add([Episode((), {"tools/calls": np.float32(1.5), "won": True}), Episode((), {"tools/calls": 4})])
    assert kept.metrics == {"tools/calls": 2.75, "won": 1.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "many", None])
def test_what_is_no_finite_number_is_left_out_and_told_once(value):
    kept = EpisodeMetrics()
    with capture_logs() as logs:
        for _ in range(3):
            kept.add([Episode((), {"good": 1.0, "bad": value})])
    assert kept.metrics == {"good": 1.0}
    assert [(line["event"], line["name"]) for line in logs] == [("episode_metric_left_out", "bad")]


@pytest.mark.parametrize("metrics", [None, [1.0], {"step": 1.0}, {3: 1.0}])
def test_what_names_no_numbers_is_left_out(metrics):
    kept = EpisodeMetrics()
    with capture_logs() as logs:
        kept.add([Episode((), metrics)])
    assert kept.metrics == {}
    assert len(logs) == 1


def test_names_without_end_cost_no_memory(monkeypatch):
    monkeypatch.setattr(episode_metrics, "MOST_NAMES", 3)
    kept = EpisodeMetrics()
    with capture_logs() as logs:
        for number in range(10):
            kept.add([Episode((), {f"episode-{number}": 1.0})])
    assert sorted(kept.metrics) == ["episode-0", "episode-1", "episode-2"]
    assert len(logs) == 1
    assert "'episode-3'" in logs[0]["reason"]


@pytest.mark.nats
@pytest.mark.usefixtures("quick")
async def test_an_actor_records_the_numbers_of_its_episodes(bus):
    engine = ScriptedEngine(answer_with("0"), policy_version=4)
    await engine.start()
    rewards = iter([0.0, 0.5, 1.0])
    environment = SingleTurn(Scorer("scripted", timeout_s=60, reward=lambda answer: next(rewards)))
    actor = Actor(bus, engine, environment)
    await actor.roll_out(make_lease(0, samples=3, policy_version=4), result=GROUPS)
    await engine.close()
    means = {"rollout/reward": 0.5, "rollout/completion_tokens": 2.0, "rollout/truncated": 0.0}
    assert actor.worker.episode_metrics.metrics == {**means, "rollout/reward_fault_fraction": 0.0}
