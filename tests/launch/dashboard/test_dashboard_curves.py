"""The curves that the dashboard draws: bounded in size, right after a resumed learner, read as they grow."""

import json
from math import nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.errors import ConfigError
from launch.dashboard import curve_feed
from launch.dashboard.charts import STALENESS_P50, TOKENS_PER_S, with_computed
from launch.dashboard.curve_feed import CurveFeed, LiveCurves
from launch.dashboard.metrics_source import MetricsFile
from launch.dashboard.run_curves import MOST, Buckets, RunCurves
from launch.settings.run_config import RunConfig
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import Record, append_records, evaluation_record, metrics_record
from tests.launch.messages import evaluation, metrics


def row(step: int, **values: float) -> Record:
    return metrics_record(metrics(step, **values))


def no_bus(run: str) -> RunConfig:
    raise ConfigError(f"nobody knows the bus of {run}")


def drawn(curves: RunCurves, name: str) -> dict[int, float]:
    table = curves.payload(everything=True)["steps"]
    return dict(zip(table["step"], table["columns"][name]["mean"], strict=True))


@settings(max_examples=30)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 400))
def test_intervals_have_the_means_and_bounds_of_their_steps(values: list[float], apart: int):
    buckets = Buckets()
    steps = [apart * n for n in range(len(values))]
    buckets.append(steps, {"reward": np.array(values)})
    assert len(buckets) <= MOST
    assert buckets.width & (buckets.width - 1) == 0
    for begin in range(0, steps[-1] + 1, buckets.width):
        within = [v for s, v in zip(steps, values, strict=True) if begin <= s < begin + buckets.width]
        place = begin // buckets.width
        low, high = buckets.bounds("reward")
        if within:
            assert buckets.mean("reward")[place] == pytest.approx(
                sum(within) / len(within), rel=1e-12, abs=1e-9
            )
            assert (low[place], high[place]) == (min(within), max(within))
        else:
            assert np.isnan(buckets.mean("reward")[place])


def test_steps_one_by_one_give_the_same_intervals_as_all_at_once():
    together, single = Buckets(), Buckets()
    values = np.random.default_rng(0).random(5000)
    together.append(range(5000), {"loss": values})
    for step, value in enumerate(values):
        single.append([step], {"loss": np.array([value])})
    assert together.width == single.width == 8
    np.testing.assert_allclose(together.mean("loss"), single.mean("loss"), rtol=1e-12)


def test_a_learner_that_resumed_undoes_what_followed():
    curves = RunCurves()
    curves.add([row(n, reward=0.1) for n in range(1, 9)] + [result(7, 0.5, 1.0)])
    curves.add([row(4, reward=0.9), row(5, reward=0.8)])
    assert drawn(curves, "reward/mean") == {1: 0.1, 2: 0.1, 3: 0.1, 4: 0.9, 5: 0.8}
    assert curves.payload()["evaluations"]["held-out"]["step"] == []


def held_out(curves: RunCurves) -> dict[int, float]:
    table = curves.payload()["evaluations"]["held-out"]
    return dict(zip(table["step"], table["columns"]["sampled"]["mean"], strict=True))


def result(step: int, sampled: float, time_s: float) -> Record:
    return evaluation_record(evaluation(step + 1, sampled), step=step, time_s=time_s)


@pytest.mark.parametrize("at_once", [True, False])
def test_evaluations_of_undone_weights_are_forgotten_wherever_a_part_ends(at_once: bool):
    first = [row(n, time_s=float(n)) for n in range(1, 21)]
    for place, step in ((20, 20), (10, 10), (4, 4)):  # the row of an evaluation follows that of its step
        first.insert(place, result(step, 0.1, step + 0.5))
    redone = [row(n, time_s=100.0 + n) for n in range(6, 25)]
    redone.insert(2, result(20, 0.1, 107.5))  # one of the weights before, which came late
    redone += [result(20, 0.7, 120.5), result(10, 0.6, 121.0)]
    curves = RunCurves()
    for part in [first + redone] if at_once else [[one] for one in first + redone]:
        curves.add(part)
    assert held_out(curves) == {4: 0.1, 10: 0.6, 20: 0.7}
    curves.add([row(15, time_s=200.0), row(16, time_s=201.0)])
    assert held_out(curves) == {4: 0.1, 10: 0.6}


def test_evaluations_of_many_steps_are_held_in_intervals():
    curves = RunCurves()
    curves.add([result(step, step / 5000, float(step)) for step in range(5000)])
    found = held_out(curves)
    assert len(found) == 625
    assert found[8] == pytest.approx(sum(range(8, 16)) / 8 / 5000)
    assert found[4992] == pytest.approx(sum(range(4992, 5000)) / 8 / 5000)


def test_evaluations_may_come_late_and_in_any_order():
    curves = RunCurves()
    for step, data_set in ((20, ""), (10, ""), (10, "hard")):
        scores = {"pass@4": 0.75}
        found = evaluation(step + 1, step / 100, data_set=data_set, scores=scores)
        curves.add([evaluation_record(found, step=step, time_s=float(step))])
    found = curves.payload()["evaluations"]
    assert list(found) == ["held-out", "hard"]
    assert found["held-out"]["step"] == [10, 20]
    assert found["held-out"]["columns"]["sampled"]["mean"] == [0.1, 0.2]
    assert found["hard"]["columns"]["pass@4"]["mean"] == [0.75]
    assert set(found["hard"]["columns"]) == {"sampled", "greedy", "pass@4"}


def test_the_warm_up_has_steps_of_its_own():
    curves = RunCurves()
    curves.add([row(n, stage="warmup", **{"train/loss": 2.0 / n}) for n in (1, 2)])
    curves.add([row(4, stage="warmup", **{"train/loss": 0.5, "heldout/loss_nats": 0.75})])
    curves.add([row(1, reward=0.5)])
    found = curves.payload()
    assert found["warmup"]["step"] == [1, 2, 4]
    assert found["warmup"]["columns"]["train/loss"]["mean"] == [2.0, 1.0, 0.5]
    assert found["warmup"]["columns"]["heldout/loss_nats"]["mean"] == [None, None, 0.75]
    assert found["steps"]["step"] == [1]


def test_median_staleness_and_throughput_are_computed_from_the_row():
    shares = {"policy/stale_tokens_0": 0.2, "policy/stale_tokens_1": 0.31, "policy/stale_tokens_2": 0.49}
    found = with_computed({**shares, "train/response_tokens": 300, "time/step_s": 2.5})
    assert found[STALENESS_P50] == 1
    assert found[TOKENS_PER_S] == 120
    assert with_computed({"policy/stale_tokens_0": 0.4, "policy/stale_tokens_more": 0.6})[
        STALENESS_P50
    ] == pytest.approx(nan, nan_ok=True)


def test_a_file_is_read_as_it_grows_and_anew_when_it_is_another(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    append_records(path, [row(1)])
    file = MetricsFile(path)
    assert [one["step"] for one in file.take()] == [1]
    with path.open("ab") as writer:
        writer.write(b'{"step": 2, "tr')
        writer.flush()
        assert file.take() == []
        writer.write(b'ain/stage": "rl"}\n{"cut off')
    assert [one["step"] for one in file.take()] == [2]
    fresh = tmp_path / "other"
    append_records(fresh, [row(7)])
    fresh.replace(path)
    assert [one["step"] for one in file.take()] == [7]
    assert file.beginnings == 1


async def test_a_long_file_is_drawn_from_a_sample_until_all_of_it_was_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(curve_feed, "PART_BYTES", 1 << 16)
    monkeypatch.setattr("launch.dashboard.metrics_source.PART_BYTES", 1 << 16)
    monkeypatch.setattr("launch.dashboard.metrics_source.SAMPLED_LINES", 50)
    run = RunDirectory(tmp_path, "long")
    append_records(run.metrics, [row(n, reward=n / 2000) for n in range(1, 2001)])
    feed = CurveFeed(run, no_bus)
    await feed.refresh()
    sampled = drawn(feed.curves, "reward/mean")
    assert feed.read_fraction < 1
    assert 40 <= len(sampled) <= 51
    assert all(value == pytest.approx(step / 2000, abs=2e-3) for step, value in sampled.items())
    assert min(sampled) < 100
    assert max(sampled) > 1900
    while feed.read_fraction < 1:
        await feed.refresh()
    assert len(drawn(feed.curves, "reward/mean")) == 1001
    assert feed.problem == ""


async def test_a_file_of_several_parts_is_read_to_its_end_at_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("launch.dashboard.metrics_source.PART_BYTES", 1 << 12)
    run = RunDirectory(tmp_path, "r")
    append_records(run.metrics, [row(n) for n in range(1, 200)])
    feed = CurveFeed(run, no_bus)
    await feed.refresh()
    assert (feed.curves.steps.last, feed.read_fraction) == (199, 1.0)


async def test_a_browser_is_sent_only_what_it_lacks(tmp_path: Path):
    run = RunDirectory(tmp_path, "r")
    append_records(run.metrics, [row(n) for n in range(1, 6)])
    feed, sent = CurveFeed(run, no_bus), LiveCurves()
    await feed.refresh()
    first = sent.news(feed)
    assert (first["from"], first["steps"]["step"]) == (0, [1, 2, 3, 4, 5])
    assert sent.news(feed) is None
    append_records(run.metrics, [row(6)])
    await feed.refresh()
    second = sent.news(feed)
    assert (second["from"], second["steps"]["step"]) == (5, [5, 6])
    append_records(run.metrics, [row(3, reward=0.75)])
    await feed.refresh()
    undone = sent.news(feed)
    assert (undone["from"], undone["steps"]["step"]) == (0, [1, 2, 3])
    assert json.loads(json.dumps(undone, allow_nan=False)) == undone


async def test_why_there_are_no_metrics_is_told(tmp_path: Path):
    feed = CurveFeed(RunDirectory(tmp_path, "elsewhere"), no_bus)
    await feed.refresh()
    assert feed.problem == "nobody knows the bus of elsewhere"
    assert not (tmp_path / "elsewhere").exists()


async def test_metrics_that_appear_later_are_read_from_then_on(tmp_path: Path):
    run = RunDirectory(tmp_path, "later")
    feed = CurveFeed(run, no_bus)
    await feed.refresh()
    assert feed.problem
    append_records(run.metrics, [row(1), row(2)])
    await feed.refresh()
    assert (feed.curves.steps.last, feed.problem) == (2, "")


async def test_the_bus_is_asked_no_more_often_for_many_pages_and_its_error_sends_no_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def away(run: str) -> RunConfig:
        asked.append(run)
        raise ConfigError(f"no answer to question {len(asked)}")

    feed, page = CurveFeed(RunDirectory(tmp_path, "far"), away), LiveCurves()
    for _ in range(5):
        await feed.refresh()
    assert asked == ["far"]
    assert page.news(feed)["problem"] == "no answer to question 1"
    monkeypatch.setattr(curve_feed, "BUS_PERIOD_S", 0)
    await feed.refresh()
    assert page.news(feed) == {"read": 1.0, "problem": "no answer to question 2"}
