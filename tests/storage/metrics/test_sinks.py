"""TensorBoard and Weights & Biases (offline), by their own libraries and readers."""

import asyncio
import importlib.util
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from bus.errors import ConfigError
from storage.disk.run_directory import RunDirectory
from storage.metrics import sinks
from storage.metrics.sinks import Points, ThreadedSink, metric_sinks
from storage.settings.metrics import MetricsConfig, WandbConfig

LOG_BLOCK, LOG_WHOLE, LOG_LAST = 32768, 1, 4
WARM = {"kind": "metrics", "source": "learner", "time_s": 10.5, "step": 1, "train/stage": "warmup",
        "train/loss": 3.0}  # fmt: skip
STEP = {"kind": "metrics", "source": "learner", "time_s": 20.5, "step": 1, "train/stage": "rl",
        "train/loss": 2.0, "train/skipped": False, "reward/mean": None}  # fmt: skip
LATER = STEP | {"step": 2, "time_s": 30.5, "train/loss": 1.0}
MEASURED = {"kind": "evaluation", "source": "evaluation", "time_s": 25.5, "step": 1, "sampled": 0.5,
            "policy_version": 2}  # fmt: skip
COUNTED = {"kind": "metrics", "source": "actor-1", "time_s": 22.5, "step": 3, "engine/busy_s": 4.0,
           "engine/tokens": 100}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs", "test")


async def written(config: MetricsConfig, run: RunDirectory, *rows: dict) -> None:
    async with metric_sinks(config, run, '{"seed": 3}') as opened:
        for sink in opened:
            for row in rows:
                sink.write(row)


def curves(directory: Path) -> dict[str, list[tuple[float, int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory))
    found.Reload()
    return {
        tag: [(point.wall_time, point.step, point.value) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


async def test_tensorboard_has_each_curve_over_its_own_steps_and_a_restart_goes_on(run: RunDirectory):
    config = MetricsConfig(tensorboard=True)
    await written(config, run, WARM, STEP, COUNTED, MEASURED)
    await written(config, run, LATER)
    found = curves(run.path / "tensorboard")
    assert found["warmup/train/loss"] == [(10.5, 1, 3.0)]
    assert found["train/loss"] == [(20.5, 1, 2.0), (30.5, 2, 1.0)]
    assert found["evaluation/sampled"] == [(25.5, 1, 0.5)]
    assert found["actors/engine/tokens"] == [(22.5, 3, 100.0)]
    assert "reward/mean" not in found


def test_counters_are_summed_over_the_actors():
    points = Points()
    assert len(list(points.of(COUNTED))) == 1
    assert list(points.of(COUNTED | {"source": "actor-2"})) == []  # too soon
    points._drawn_s -= 60
    [point] = points.of(COUNTED | {"source": "actor-3"})
    assert point.values == {"actors/count": 3, "actors/engine/busy_s": 12, "actors/engine/tokens": 300}


def test_means_of_episodes_are_averaged_over_the_actors_that_have_them():
    points = Points()
    list(
        points.of(
            COUNTED | {"rollout/reward": 0.2, "my/turns": 4, "rollout/means": ["my/turns", "rollout/reward"]}
        )
    )
    points._drawn_s -= 60
    other = {"source": "actor-2", "rollout/reward": 0.4, "rollout/means": ["rollout/reward"]}
    [point] = points.of(COUNTED | other)
    assert point.values["actors/rollout/reward"] == pytest.approx(0.3)
    assert (point.values["actors/my/turns"], point.values["actors/engine/tokens"]) == (4, 200)


def test_of_how_far_engines_are_from_the_learner_the_greatest_is_drawn():
    points = Points()
    list(points.of(COUNTED | {"engine/probe_nats": 0.3}))
    points._drawn_s -= 60
    [point] = points.of(COUNTED | {"source": "actor-2", "engine/probe_nats": 0.1})
    assert point.values["actors/engine/probe_nats"] == 0.3


def test_the_share_of_broken_episodes_is_that_of_all_actors_and_no_sum():
    points, both = Points(), {}
    for source, episodes, failed in (("a", 100, 50), ("b", 900, 0)):
        points._drawn_s -= 60
        row = COUNTED | {
            "source": source,
            "rollout/recent_episodes": episodes,
            "rollout/recent_infra_failed_episodes": failed,
            "rollout/infra_failed_fraction": failed / episodes,
        }
        [point] = points.of(row)
        both[source] = point.values["actors/rollout/infra_failed_fraction"]
    assert both == {"a": 0.5, "b": 0.05}


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log that begins with a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := -at % LOG_BLOCK) and left < 7:  # what is left of a block holds no head
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (LOG_WHOLE, LOG_LAST):
            yield record
            record = b""


def offline(directory: Path) -> tuple[list[dict], dict[str, str]]:
    """Every row that W&B wrote to the file of an offline run, and over which axis each curve is drawn."""
    from wandb.proto import wandb_internal_pb2

    [path] = directory.glob("*.wandb")
    rows, axes = [], {}
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        if record.HasField("metric"):
            axes[record.metric.name] = record.metric.step_metric
    return rows, axes


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of wandb's own
async def test_wandb_offline_has_the_rows_and_a_restart_keeps_the_id(run: RunDirectory, monkeypatch):
    import wandb

    monkeypatch.setattr(sinks, "CLOSE_S", 120.0)  # its process takes long to start on a busy machine
    config = MetricsConfig(wandb=WandbConfig(project="sluice", mode="offline"))
    await written(config, run, WARM, STEP, COUNTED, MEASURED)
    await asyncio.to_thread(threading.Event().wait, 1.1)  # wandb names directories by the second
    await written(config, run, LATER)
    await asyncio.to_thread(
        wandb.teardown
    )  # `finish` does not wait until wandb's process has closed the file
    directories = sorted((run.path / "wandb").glob("offline-run-*"))
    assert len(directories) == 2
    assert len({directory.name.split("-", 3)[3] for directory in directories}) == 1
    (first, axes), (second, _) = map(offline, directories)
    assert axes["warmup/train/loss"] == "warmup/step"
    assert axes["train/loss"] == "step"
    assert axes["evaluation/sampled"] == "evaluation/step"
    assert axes["actors/engine/tokens"] == "actors/policy_version"
    [warm] = [row for row in first if "warmup/train/loss" in row]
    assert (warm["warmup/train/loss"], warm["warmup/step"], warm["_timestamp"]) == (3.0, 1, 10.5)
    [step] = [row for row in first if "train/loss" in row]
    assert (step["train/loss"], step["step"], step["_timestamp"]) == (2.0, 1, 20.5)
    assert [r["evaluation/sampled"] for r in first if "evaluation/sampled" in r] == [0.5]
    assert [r["actors/engine/tokens"] for r in first if "actors/engine/tokens" in r] == [100]
    assert [(r["step"], r["train/loss"]) for r in second if "train/loss" in r] == [(2, 1.0)]


def test_a_sink_that_fails_is_logged_once_and_raises_nothing():
    def refuse() -> sinks.Library:
        raise OSError("no such disk")

    with structlog.testing.capture_logs() as logged:
        sink = ThreadedSink("broken", refuse)
        for _ in range(50):
            sink.write(STEP)
        sink.close()
    assert [(entry["event"], entry["reason"]) for entry in logged] == [
        ("metrics_sink_fails", "OSError: no such disk")
    ]


async def test_a_sink_that_hangs_holds_up_neither_rows_nor_the_end(monkeypatch):
    monkeypatch.setattr(sinks, "CLOSE_S", 0.1)
    monkeypatch.setattr(sinks, "MOST_ROWS", 5)
    never = threading.Event()
    with structlog.testing.capture_logs() as logged:
        sink = ThreadedSink("hung", lambda: never.wait(20))
        for _ in range(20):
            sink.write(STEP)
        sink.close()
    never.set()
    assert [entry["event"] for entry in logged] == ["metrics_sink_fails", "metrics_sink_not_closed"]


async def test_a_missing_package_is_refused_with_the_remedy(run: RunDirectory, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for config, extra in (
        (MetricsConfig(tensorboard=True), "tensorboard"),
        (MetricsConfig(wandb=WandbConfig(project="mine")), "wandb"),
    ):
        with pytest.raises(ConfigError, match=rf"pip install 'sluice-rl\[{extra}\]'"):
            await written(config, run)
    await written(MetricsConfig(), run)
