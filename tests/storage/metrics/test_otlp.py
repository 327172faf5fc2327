"""Spans and metrics as a collector of OpenTelemetry gets them."""

import asyncio
import importlib.util
import socket

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from bus.errors import ConfigError
from storage.disk.run_directory import RunDirectory
from storage.metrics import spans
from storage.metrics.sinks import metric_sinks
from storage.metrics.spans import span, traced
from storage.settings.metrics import MetricsConfig
from tests.otlp_collector import Collector, collecting

STEP = {"kind": "metrics", "source": "learner", "time_s": 20.5, "step": 7, "train/loss": 2.0, "my score!": 3}


async def written(collector: Collector, run: RunDirectory, *rows) -> None:
    async with metric_sinks(MetricsConfig(otlp_url=collector.url), run, "{}") as opened:
        for row in rows:
            for sink in opened:
                sink.write(row)


async def test_rows_become_gauges_with_their_step(tmp_path):
    with collecting() as collector:
        await written(collector, RunDirectory(tmp_path, "demo"), STEP)
    assert collector.values == {"sluice/train/loss": 2.0, "sluice/my_score_": 3.0, "sluice/step": 7.0}
    [sender] = collector.senders
    assert (sender["service.name"], sender["sluice.run"], sender["sluice.role"]) == (
        "sluice",
        "demo",
        "storage",
    )


async def test_a_collector_that_refuses_is_logged_and_ends_nothing(tmp_path):
    with collecting() as collector, capture_logs() as logs:
        collector.refuses = True
        await written(collector, RunDirectory(tmp_path, "demo"), STEP)
    assert [(line["event"], line["sink"]) for line in logs] == [("metrics_sink_fails", "OpenTelemetry")]
    assert f"{collector.url} did not take the metrics" in logs[0]["reason"]


async def test_spans_are_nested_also_over_tasks_and_say_what_failed():
    with collecting() as collector:
        async with traced(MetricsConfig(otlp_url=collector.url), run="demo", role="learner"):
            with span("step", step=3):
                with span("train") as note:
                    note("end", "done")
                later = asyncio.create_task(publish())
            await later
            with pytest.raises(OSError, match="no space"), span("broken"):
                raise OSError("no space")
        with span("outside"):
            pass
    found = {one.name: one for one in collector.spans}
    assert found.keys() == {"step", "train", "publish", "broken"}
    assert {found[name].parent_span_id for name in ("train", "publish")} == {found["step"].span_id}
    assert collector.attributes(found["step"]) == {"step": 3}
    assert collector.attributes(found["train"]) == {"end": "done"}
    assert found["broken"].status.message == "OSError: no space"
    assert found["step"].end_time_unix_nano >= found["train"].end_time_unix_nano
    assert {sender["sluice.role"] for sender in collector.senders} == {"learner"}


async def test_a_collector_that_never_answers_does_not_keep_a_process_from_ending(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as logs:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with traced(MetricsConfig(otlp_url=url), run="demo", role="actor"):
            monkeypatch.setattr(spans, "OTLP_TIMEOUT_S", 0.1)  # far below that of a request
            with span("rollout"):
                pass
        assert {"event": "spans_not_sent", "collector": url, "waited_s": 0.1}.items() <= logs[-1].items()


async def publish() -> None:
    with span("publish"):
        await asyncio.sleep(0)


async def test_a_missing_package_and_a_url_that_is_none_are_refused_by_name(monkeypatch):
    for wrong in ("collector:4318", "http://me:secret@collector:4318", "http://collector:4318/"):
        with pytest.raises(ValidationError, match="otlp_url"):
            MetricsConfig(otlp_url=wrong)
    assert MetricsConfig(otlp_url="https://collector/otlp").otlp_url == "https://collector/otlp"
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"metrics\.otlp_url needs .*pip install 'sluice-rl\[otlp\]'"):
        async with traced(MetricsConfig(otlp_url="http://collector:4318"), run="demo", role="actor"):
            pass
