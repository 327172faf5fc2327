"""The monitor's state, and metrics.jsonl."""

import asyncio
import json
import time
from dataclasses import replace
from itertools import pairwise
from math import isnan, nan
from pathlib import Path

import pytest

from bus.codec import encode
from bus.connection.bus import Bus
from bus.evaluation_messages import EvaluationResult
from bus.messages import Metrics
from bus.streams.publish import Publisher
from launch.run_view import history as histories
from launch.run_view.history import History
from launch.run_view.monitor import RunMonitor, watch
from launch.screens.terminal_view import News
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import append_records, metrics_record, read_records
from tests.launch.messages import FACTS, MIB, Clock, actor, evaluation, learner, metrics, storage


def make_monitor() -> tuple[RunMonitor, Clock]:
    clock = Clock()
    return RunMonitor(FACTS, clock=clock), clock


def test_a_process_is_silent_after_five_seconds_and_an_actor_is_forgotten_after_a_minute():
    monitor, clock = make_monitor()
    monitor.on_status(learner())
    monitor.on_status(actor())
    clock.now_s += 4.9
    assert len(monitor.actors()) == 1
    clock.now_s += 0.2
    assert monitor.actors() == []
    assert [round(monitor.silent_s(p), 1) for p in monitor.shown()] == [5.1, 5.1]
    clock.now_s += 60
    assert [p.status.source for p in monitor.shown()] == ["learner"]


def test_the_newest_step_is_one_of_the_learner_and_no_figures_of_storage():
    monitor, _ = make_monitor()
    monitor.on_event(metrics(1), 10.0)
    monitor.on_event(Metrics(source="storage", step=2, time_s=0.0, values={"sources/a": 1}), 20.0)
    assert monitor.newest_step_s == 10.0
    monitor.on_event(metrics(2, stage="warmup"), 30.0)
    assert monitor.newest_step_s == 30.0


def test_process_that_speaks_seldom_is_silent_after_two_and_a_half_of_its_periods():
    monitor, clock = make_monitor()
    monitor.on_status(replace(actor(), next_s=10.0))
    clock.now_s += 24
    assert len(monitor.actors()) == 1
    clock.now_s += 2
    assert monitor.actors() == []


def test_lines_come_in_the_order_learner_storage_actors():
    monitor, _ = make_monitor()
    for status in (actor(1), actor(0), storage(), learner()):
        monitor.on_status(status)
    assert [p.status.source for p in monitor.shown()] == [
        "learner",
        "storage",
        "actor-host-1000",
        "actor-host-1001",
    ]


def test_peak_memory_covers_restarts_and_sums_only_what_lived_together():
    monitor, clock = make_monitor()
    monitor.on_status(learner(rss=1000 * MIB))
    monitor.on_status(actor(0, rss=300 * MIB))
    monitor.note_memory("nats-server", 50 * MIB)
    clock.now_s += 10  # actor 0 is killed; the learner starts again, smaller
    monitor.on_status(learner(pid=9, rss=400 * MIB))
    monitor.on_status(actor(1, rss=310 * MIB))
    assert monitor.processes["learner"].starts == 2
    assert monitor.peak_rss_bytes == {
        "learner": 1000 * MIB,
        "actor-host-1000": 300 * MIB,
        "nats-server": 50 * MIB,
        "actor-host-1001": 310 * MIB,
    }
    assert monitor.peak_rss_bytes_total == 1350 * MIB


def test_published_trajectories_of_actors_that_left_still_count():
    monitor, clock = make_monitor()
    monitor.on_status(actor(0, trajectories=100))
    clock.now_s += 100
    monitor.on_status(actor(1, trajectories=10))
    monitor.on_status(actor(1, trajectories=30))
    assert monitor.trajectories_published == 130
    monitor.on_status(storage(trajectories_stored=500))  # most by an earlier launch
    assert monitor.trajectories_published == 500


def test_actors_that_come_and_go_leave_nothing_but_their_sum(monkeypatch):
    monkeypatch.setattr("launch.run_view.monitor.KEPT_COUNTS", 50)
    monkeypatch.setattr("launch.run_view.monitor.KEPT_PEAKS", 70)
    monitor, clock = make_monitor()
    news = News(monitor)
    for number in range(500):
        monitor.on_status(actor(number, trajectories=2, rss=10 * MIB))
        clock.now_s += 10
        news.take()
    assert len(monitor.processes) <= 8
    assert len(monitor.peak_rss_bytes) <= 80
    assert len(monitor._published) <= 60
    assert len(news._starts) + len(news._away) <= 16
    assert monitor.trajectories_published == 1000
    assert monitor.peak_rss_bytes_total == 10 * MIB
    assert monitor.values("actor")["trajectories"] == 2


def test_actor_that_was_silent_for_an_hour_is_counted_once():
    monitor, clock = make_monitor()
    monitor.on_status(actor(0, trajectories=5))
    clock.now_s += 3600
    monitor.on_status(learner())
    assert list(monitor.processes) == ["learner"]
    assert monitor.values("actor") == {}
    monitor.on_status(actor(0, trajectories=7))
    assert monitor.trajectories_published == 7


@pytest.mark.parametrize("actors", [10, 1000])
def test_cost_of_a_status_does_not_grow_with_the_actors(actors: int):
    """The clock is asked whenever a process is looked at."""
    monitor, clock = make_monitor()
    for number in range(actors):
        monitor.on_status(actor(number))
    asked = clock.asked
    for number in range(10):
        monitor.on_status(actor(number))
    assert clock.asked - asked <= 40


def test_stage_and_first_version_follow_the_learner():
    monitor, _ = make_monitor()
    assert (monitor.stage, monitor.trains_from) == ("starting", 0)
    monitor.on_status(learner(stage="warmup", step=0))
    assert (monitor.stage, monitor.trains_from) == ("warmup", 0)
    monitor.on_status(learner(stage="rl", step=7))
    assert (monitor.stage, monitor.trains_from) == ("rl", 1)


def test_numbers_of_another_type_than_expected_do_no_harm():
    monitor, _ = make_monitor()
    monitor.on_status(actor(trajectories="many", generated_tokens_per_s=None))
    monitor.on_status(learner(trajectories_trained="7", policy_version=None))
    monitor.on_event(metrics(1, reward=None), time.time())
    assert monitor.trajectories_published == 0
    assert monitor.generated_tokens_per_s == 0
    assert isnan(monitor.history.recent_reward())


def test_the_history_of_a_long_run_is_thinned_out_and_its_latest_steps_are_whole(monkeypatch):
    monkeypatch.setattr(histories, "MOST", 100)
    monkeypatch.setattr(histories, "LATEST", 20)
    history, sizes = History(), []
    for step in range(1, 2001):
        history.add(metrics_record(metrics(step, reward=step)))
        sizes.append(len(history.steps))
    assert max(sizes) == 100
    assert min(sizes[100:]) >= 40
    steps = list(history.steps)
    assert steps[0] == 1
    assert steps[-20:] == list(range(1981, 2001))
    assert max(b - a for a, b in pairwise(steps)) <= 64
    assert history.recent_reward() == 1995.5
    assert history.last.step == 2000


def test_recent_reward_is_the_mean_of_the_last_ten_steps():
    history = History(metrics_record(metrics(step, reward=step)) for step in range(1, 21))
    assert history.recent_reward() == 15.5


def test_warm_up_steps_are_recorded_but_are_no_step_of_the_curves():
    monitor, _ = make_monitor()
    monitor.on_event(metrics(3, stage="warmup"), 0.0)
    assert monitor.history.last is None


def test_steps_after_a_rollback_replace_those_that_were_lost():
    history = History(metrics_record(metrics(step, reward=0.1)) for step in range(1, 11))
    history.add(metrics_record(metrics(6, reward=0.9, time_s=2000.0)))
    assert list(history.steps) == [1, 2, 3, 4, 5, 6]
    assert history.steps[6].reward_mean == 0.9


def test_a_late_or_repeated_record_takes_nothing_back():
    history = History(metrics_record(metrics(step)) for step in (1, 3, 2, 3, 1))
    assert list(history.steps) == [1, 2, 3]


def test_evaluations_of_lost_versions_go_with_their_steps():
    monitor, _ = make_monitor()
    for step in range(1, 11):
        monitor.on_event(metrics(step), time.time())
    for version in (1, 6, 11):
        monitor.on_event(evaluation(version, 0.5), time.time())
    monitor.on_event(metrics(6, time_s=time.time() + 10), time.time())
    assert list(monitor.history.evaluations) == [1, 6]


def test_an_evaluation_that_lost_versions_answered_goes_with_them():
    monitor, _ = make_monitor()
    for step in range(1, 11):
        monitor.on_event(metrics(step), time.time())
    for version, newest in ((4, 6), (5, 9)):
        monitor.on_event(evaluation(version, 0.5, drawn_by=(version, newest)), time.time())
    monitor.on_event(metrics(6, time_s=time.time() + 10), time.time())
    assert list(monitor.history.evaluations) == [4]


def test_a_line_cut_short_by_a_kill_costs_only_itself(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    append_records(path, [metrics_record(metrics(1))])
    with path.open("a") as file:
        file.write('{"time_s":12,"sou')
    append_records(path, [metrics_record(metrics(2))])
    assert [record["step"] for record in read_records(path)] == [1, 2]


def test_what_json_cannot_say_becomes_null(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    append_records(path, [metrics_record(metrics(1, reward=nan))])
    assert json.loads(path.read_text())["reward/mean"] is None


def test_a_missing_file_has_no_records(tmp_path: Path):
    assert list(read_records(tmp_path / "metrics.jsonl")) == []


@pytest.mark.nats
async def test_watch_shows_what_was_recorded_before_and_what_the_bus_holds(bus: Bus, tmp_path: Path):
    run, stop, monitor = RunDirectory(tmp_path, "demo"), asyncio.Event(), RunMonitor(FACTS)
    append_records(run.metrics, [metrics_record(metrics(1))])
    await publish(bus, metrics(2), evaluation(3, 0.7, drawn_by=(3, 4), failed=5))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch(bus, monitor, stop, run=run))
        while 3 not in monitor.history.evaluations:  # noqa: ASYNC110  # the monitor tells nobody
            await asyncio.sleep(0.01)
        for status in (learner(), actor(), storage()):
            await bus.notify(bus.subject("status", status.role), status)
        await publish(bus, metrics(3))
        await bus.client.flush()
        stop.set()
    assert sorted(monitor.processes) == ["actor-host-1000", "learner", "storage"]
    assert list(monitor.history.steps) == [1, 2, 3]
    found = monitor.history.evaluations[3]
    assert (found.drawn_by, found.failed) == ((3, 4), 5)


async def publish(bus: Bus, *events: Metrics | EvaluationResult) -> None:
    for event in events:
        token = "metrics" if isinstance(event, Metrics) else "evaluation"
        name = f"{token}-{event.step if isinstance(event, Metrics) else event.policy_version}"
        await Publisher(bus).publish(bus.subject("events", token), encode(event), message_id=name)


@pytest.mark.nats
async def test_watch_ends_although_the_bus_is_gone(bus: Bus, server, monkeypatch):
    monkeypatch.setattr("launch.run_view.monitor.DRAIN_TIMEOUT_S", 0.2)
    stop, monitor = asyncio.Event(), RunMonitor(FACTS)
    await publish(bus, metrics(1))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch(bus, monitor, stop))
        while not monitor.history.steps:  # noqa: ASYNC110  # the monitor tells nobody
            await asyncio.sleep(0.01)
        await server.kill()
        stop.set()
    assert list(monitor.history.steps) == [1]
    await server.start()
