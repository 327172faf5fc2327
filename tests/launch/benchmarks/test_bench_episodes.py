"""Tests what `launch bench episodes` reports."""

import pytest

from benchmarks.episodes import EpisodesLoad, bench_episodes
from bus.errors import ConfigError


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.nats
def test_bench_runs_all_episodes_and_finds_them_whole_on_the_bus():
    report = bench_episodes(EpisodesLoad(episodes=16, turns=3, turn_s=0.01))
    assert (report["episodes"], report["turns"], report["lost"], report["verified"]) == (16, 3, 0, True)
    assert 0 < report["event_loop_lag_p50_ms"] <= report["event_loop_lag_p99_ms"]
    assert report["turns_per_s"] > 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.nats
@pytest.mark.parametrize("kind", ["chat", "gateway"])
def test_long_episodes_cost_as_much_a_turn_as_short_ones_and_none_is_lost(kind):
    # an hour of episodes stores its turns 60 times; here that is some times a second
    short, long = (
        bench_episodes(EpisodesLoad(8, turns, turn_s=0, kind=kind, keep_turns_every_s=0.3))
        for turns in (100, 1000)
    )
    assert [(one["lost"], one["verified"]) for one in (short, long)] == [(0, True)] * 2
    assert long["tokens_per_episode"] > 125_000
    # a gateway's client sends all that was said with each turn: ten times as much to read, and nothing more
    assert long["cpu_per_turn_ms"] < {"chat": 5, "gateway": 10}[kind] * short["cpu_per_turn_ms"]
    assert long["memory_per_episode_kib"] < 16 << 10


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.nats
def test_sixty_four_episodes_at_once_work_in_sandboxes_and_none_is_lost():
    report = bench_episodes(EpisodesLoad(64, 50, turn_s=0, kind="sandbox"))
    assert (report["lost"], report["verified"], report["tokens_per_episode"] > 30_000) == (0, True, True)
    assert report["memory_per_episode_kib"] < 4 << 10


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.nats
def test_two_thousand_episodes_run_at_once_and_none_is_lost():
    report = bench_episodes(EpisodesLoad(2000, 10, turn_s=1.0))
    assert (report["episodes"], report["lost"], report["verified"]) == (2000, 0, True)
    assert report["memory_per_episode_kib"] < 512


@pytest.mark.parametrize(
    ("load", "reason"),
    [((7, 1, 1.0), "multiple of 8"), ((8, 0, 1.0), "a turn at least"), ((8, 1, -1.0), "no time below 0")],
)
def test_load_that_cannot_be_asked_for_is_refused(load: tuple[int, int, float], reason: str):
    with pytest.raises(ConfigError, match=reason):
        EpisodesLoad(*load)
