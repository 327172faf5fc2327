"""Writes a run's metrics to TensorBoard, W&B and OpenTelemetry, beside metrics.jsonl and never in its way."""

import asyncio
import importlib.util
import json
import queue
import re
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from bus.actor_counters import INFRA_FAILED_FRACTION, MEANS, RECENT_EPISODES, RECENT_INFRA_FAILED
from bus.codec import Json
from bus.errors import ConfigError
from bus.process.log_throttle import LogThrottle
from storage.disk.atomic_files import read_json, write_json
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import Record, integer, is_counters, number
from storage.settings.metrics import MetricsConfig, WandbConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

log = structlog.get_logger()
MOST_ROWS = 10_000
"""Rows that wait for a sink; further ones are left out there."""
SAY_SO_S = 60.0
"""Seconds between two lines of the log about a sink that fails, and before a failed one is opened again."""
LOGIN_S = 10.0
"""Longest time that Weights & Biases may wait for a key."""
CLOSE_S = 20.0
"""Longest time that a sink may take to write its last rows."""
COUNTERS_PERIOD_S = 10.0
"""Seconds between two points of the actors' counters."""
COUNTERS_KEPT_S = 60.0
"""Seconds after which an actor that sends no counters is left out of the sums."""
OTLP_TIMEOUT_S = 5
"""Whole seconds that a collector of OpenTelemetry may take for one request."""
_REFUSED_BY_OTLP = re.compile(r"[^A-Za-z0-9_.\-/]")
"""Characters that a name of OpenTelemetry does not have."""
_NO_VALUES = {"time_s", "step", "event"}
_GREATEST = {"engine/probe_nats"}
"""Counters of which the greatest of all actors is drawn: a sum would say nothing."""


@dataclass(frozen=True)
class Point:
    """Values of one moment."""

    axis: str
    """Name of the step that they are drawn over."""
    step: int
    time_s: float
    """Seconds since the epoch."""
    values: dict[str, float]


class Points:
    """Makes points of rows. Of actors, which come and go, the sums of the counters are drawn, the mean of
    what are means of episodes, or the greatest where neither says anything."""

    def __init__(self) -> None:
        self._counters: dict[str, tuple[float, Record]] = {}
        """The latest counters of each actor, and when they came."""
        self._drawn_s = -COUNTERS_PERIOD_S

    def of(self, row: Record) -> Iterator[Point]:
        """Return the points of a row; counters give one every `COUNTERS_PERIOD_S`."""
        if is_counters(row):
            yield from self._of_counters(row, monotonic())
            return
        values = dict(_numbers(row))
        axis = "step"
        if row.get("kind") == "evaluation":
            area = "/".join(["evaluation", *([str(row["data_set"])] if "data_set" in row else [])])
            axis, values = "evaluation/step", _prefixed(area, values)
        elif row.get("train/stage") == "warmup":  # the steps of both stages begin at 1
            axis, values = "warmup/step", _prefixed("warmup", values)
        elif row.get("source") != "learner":
            source = str(row.get("source"))
            axis, values = f"{source}/step", _prefixed(source, values)
        yield Point(axis, integer(row, "step"), number(row, "time_s"), values)

    def _of_counters(self, row: Record, now_s: float) -> Iterator[Point]:
        self._counters[str(row.get("source"))] = now_s, row
        if now_s - self._drawn_s < COUNTERS_PERIOD_S:
            return
        self._drawn_s = now_s
        self._counters = {
            source: (at_s, latest)
            for source, (at_s, latest) in self._counters.items()
            if now_s - at_s < COUNTERS_KEPT_S
        }
        sums: dict[str, float] = {"actors/count": float(len(self._counters))}
        means: defaultdict[str, list[float]] = defaultdict(list)
        for _, latest in self._counters.values():
            of_episodes = latest.get(MEANS) or ()
            for name, value in _numbers(latest):
                if isinstance(of_episodes, list) and name in of_episodes:
                    means[f"actors/{name}"].append(value)
                    continue
                before = sums.get(f"actors/{name}", 0.0)
                sums[f"actors/{name}"] = max(before, value) if name in _GREATEST else before + value
        sums |= {name: fmean(values) for name, values in means.items()}
        if episodes := sums.get(f"actors/{RECENT_EPISODES}"):
            failed = sums.get(f"actors/{RECENT_INFRA_FAILED}", 0.0)
            sums[f"actors/{INFRA_FAILED_FRACTION}"] = failed / episodes
        yield Point("actors/policy_version", integer(row, "step"), number(row, "time_s"), sums)


def _numbers(row: Record) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name not in _NO_VALUES and _is_number(value):
            yield name, number(row, name) if not isinstance(value, bool) else float(value)


def _is_number(value: Json) -> bool:
    return isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value))


def _prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


class Library(Protocol):
    """Draws points somewhere. It may wait and raise as it likes: it has a thread of its own."""

    def draw(self, point: Point) -> None:
        """Take the values of one moment."""

    def close(self) -> None:
        """Write what is left."""


class ThreadedSink:
    """Hands rows to a library in a thread. What fails there is logged, and costs only its curves."""

    def __init__(self, name: str, open_library: Callable[[], Library]) -> None:
        self._name = name
        self._open_library = open_library
        self._library: Library | None = None
        self._rows: queue.Queue[Record | None] = queue.Queue(MOST_ROWS)
        self._points = Points()
        self._closed_until_s = -inf
        self._failures = LogThrottle(SAY_SO_S)
        self._left_out = 0
        self._thread = threading.Thread(target=self._work, name=f"metrics to {name}", daemon=True)
        self._thread.start()

    def write(self, row: Record) -> None:
        """Take a row, without waiting."""
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._fails("the sink is too slow")

    def close(self) -> None:
        """Return when the rows so far are written, or after `CLOSE_S`."""
        deadline = time.monotonic() + CLOSE_S
        try:
            self._rows.put(None, timeout=CLOSE_S)
        except queue.Full:
            log.warning("metrics_sink_not_closed", sink=self._name, waited_s=CLOSE_S)
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("metrics_sink_not_closed", sink=self._name, waited_s=CLOSE_S)

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            try:
                self._draw(row)
            except Exception as error:  # noqa: BLE001 - libraries raise anything, and no sink may end a run
                self._fails(f"{type(error).__name__}: {error}")
                self._closed_until_s = time.monotonic() + SAY_SO_S
                self._close_library()
        self._close_library()

    def _draw(self, row: Record) -> None:
        if self._library is None:
            if time.monotonic() < self._closed_until_s:
                self._fails("the sink failed a short time ago")
                return
            self._library = self._open_library()
        for point in self._points.of(row):
            self._library.draw(point)

    def _close_library(self) -> None:
        library, self._library = self._library, None
        if library is not None:
            try:
                library.close()
            except Exception as error:  # noqa: BLE001 - as above
                self._fails(f"{type(error).__name__}: {error}")

    def _fails(self, reason: str) -> None:
        self._left_out += 1
        if self._failures.due(time.monotonic()):
            log.warning("metrics_sink_fails", sink=self._name, reason=reason, rows_left_out=self._left_out)


class TensorBoard:
    """A directory for `tensorboard --logdir`. A run that goes on adds a file to it."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory), flush_secs=10)

    def draw(self, point: Point) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        event = Event(wall_time=point.time_s, step=point.step, summary=Summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


class WandbRun:
    """A run of Weights & Biases, which keeps its id over restarts."""

    def __init__(self, config: WandbConfig, run: RunDirectory, settings: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            id=wandb_id(run),
            name=run.name,
            resume="allow",
            dir=str(run.path),
            config=settings,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                login_timeout=LOGIN_S,  # else wandb asks a terminal for a key, and waits
                x_disable_stats=True,
            ),
        )
        self._drawn: set[str] = set()
        """Names of curves whose axis is defined."""

    def draw(self, point: Point) -> None:
        for name in point.values.keys() - self._drawn:
            self._run.define_metric(name, step_metric=point.axis)
        self._drawn.update(point.values)
        self._run.log({**point.values, point.axis: point.step, "_timestamp": point.time_s})

    def close(self) -> None:
        self._run.finish()


class OtlpMetrics:
    """Gauges at a collector of OpenTelemetry. Its headers come from OTEL_EXPORTER_OTLP_HEADERS."""

    def __init__(self, url: str, run: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        self._url = url
        self._exporter = OTLPMetricExporter(endpoint=f"{url}/v1/metrics", timeout=OTLP_TIMEOUT_S)
        self._reader = InMemoryMetricReader()
        provider = MeterProvider([self._reader], otlp_resource(run, "storage"), shutdown_on_exit=False)
        self._meter = provider.get_meter("sluice")

    def draw(self, point: Point) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        for name, value in (point.values | {point.axis: float(point.step)}).items():
            self._meter.create_gauge(_REFUSED_BY_OTLP.sub("_", f"sluice/{name}")).set(value)
        found = self._reader.get_metrics_data()
        if found is not None and self._exporter.export(found) is not MetricExportResult.SUCCESS:
            raise OSError(f"{self._url} did not take the metrics")

    def close(self) -> None:
        """Close the connection; each point is sent at once."""
        self._exporter.shutdown()


def otlp_resource(run: str, role: str) -> "Resource":
    """Return what a collector is told of the process that sends spans or metrics."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": "sluice", "sluice.run": run, "sluice.role": role})


def wandb_id(run: RunDirectory) -> str:
    """Return the id of this run at Weights & Biases, which is drawn once."""
    path = run.path / "wandb.json"
    if not path.exists():
        write_json(path, {"id": f"{run.name}-{secrets.token_hex(4)}"})
    return str(read_json(path, "remove it: the run then gets another id at Weights & Biases")["id"])


def refuse_missing(config: MetricsConfig) -> None:
    """Raise `ConfigError` when a sink is wanted whose package is not installed."""
    wanted = (
        ("metrics.tensorboard", "tensorboard", "tensorboard", config.tensorboard),
        ("metrics.wandb.project", "wandb", "wandb", config.wandb.project is not None),
        ("metrics.otlp_url", "opentelemetry.exporter.otlp.proto.http", "otlp", config.otlp_url is not None),
    )
    for setting, package, extra, is_wanted in wanted:
        if is_wanted and not _is_installed(package):
            raise ConfigError(
                f"{setting} needs the package {package}: pip install 'sluice-rl[{extra}]' on this host, or "
                "leave the setting out"
            )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


@asynccontextmanager
async def metric_sinks(
    config: MetricsConfig, run: RunDirectory, config_json: str
) -> AsyncIterator[Sequence[ThreadedSink]]:
    """Return the sinks that the run wants; leaving writes what is left. Raises `ConfigError` for a package
    that is missing."""
    refuse_missing(config)
    sinks = []
    if config.tensorboard:
        directory = config.tensorboard_directory or run.path / "tensorboard"
        sinks.append(ThreadedSink("TensorBoard", lambda: TensorBoard(directory)))
    if config.wandb.project is not None:
        settings = json.loads(config_json)
        sinks.append(ThreadedSink("Weights & Biases", lambda: WandbRun(config.wandb, run, settings)))
    if (url := config.otlp_url) is not None:
        sinks.append(ThreadedSink("OpenTelemetry", lambda: OtlpMetrics(url, run.name)))
    try:
        yield sinks
    finally:
        await asyncio.gather(*(asyncio.to_thread(sink.close) for sink in sinks))
