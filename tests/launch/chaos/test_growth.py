"""Growth is told from noise, and compared with what the documentation states."""

import asyncio
import json
import re
import sys
from io import StringIO
from math import inf
from pathlib import Path

import numpy as np
import psutil
import pytest
from rich.console import Console

from bus.server.nats_server import HTTP_HOST, NatsServer, free_port
from soak.growth import statements
from soak.growth.fit import fit_growth
from soak.growth.report import SIX_WEEKS_STEPS, judge, print_report
from soak.growth.run import run_compressed
from soak.growth.samples import Sample, sample_bus, sample_disk, sample_processes, sort_of_file
from soak.growth.settings import EACH_STEP, STREAM_BOUNDS

MIB = 1 << 20
STEPS = np.arange(0, 20_000, 50)


def noise(seed):
    """Memory in use for a moment: at least none, at times much."""
    draw = np.random.default_rng(seed)
    return draw.exponential(2 * MIB, len(STEPS)) + 40 * MIB * (draw.random(len(STEPS)) < 0.05)


def samples(series, values, *, lives=None, calm=None):
    part = series.rpartition(" ")[0]
    return [
        Sample(
            2.0 * n,
            int(step),
            bool(calm is None or calm[n]),
            {part: lives[n] if lives is not None else "1"},
            {series: float(value)},
        )
        for n, (step, value) in enumerate(zip(STEPS, values, strict=True))
    ]


def verdict(series, values, **given):
    [found] = judge(samples(series, values, **given), EACH_STEP, STREAM_BOUNDS)
    return found


@pytest.mark.parametrize("per_step", [300.0, 3000.0])
def test_a_leak_is_found_with_its_rate_among_noise(per_step):
    found = fit_growth(STEPS, 300 * MIB + noise(1) + per_step * STEPS)
    assert 0 < found.low <= per_step <= found.high
    assert found.per_step == pytest.approx(per_step, rel=0.3)
    assert found.steps == pytest.approx(0.6 * 19_950 * 23 / 24, rel=0.01)  # between the windows' middles


def test_a_straight_line_has_its_slope_exactly():
    found = fit_growth([0, *range(100, 10_000, 100)], [5.0, *(7.0 + 0.5 * np.arange(100, 10_000, 100))])
    assert found.per_step == pytest.approx(0.5, rel=0.1)  # a window's floor lies at its beginning
    assert (found.windows, found.first < found.last) == (24, True)


def test_noise_is_no_growth():
    words = [verdict("learner memory_bytes", 300 * MIB + noise(seed)).words for seed in range(40)]
    assert words.count("does not grow") >= 36, words
    assert "grows beyond what is stated" not in words


def test_a_sawtooth_is_no_growth():
    found = verdict("disk replay/index bytes", 4 * MIB + (STEPS % 450) * 1000.0)
    assert found.words == "does not grow"


def test_filling_caches_at_the_beginning_are_no_growth():
    found = verdict("actors memory_bytes", 300 * MIB * (1 - np.exp(-STEPS / 800)) + noise(2))
    assert found.words == "does not grow"


def test_a_restart_in_between_is_no_leak_and_the_longest_life_counts():
    lives = ["1"] * 100 + ["2"] * 300  # the first one was small
    values = np.where(np.arange(400) < 100, 50 * MIB, 300 * MIB) + noise(3)
    assert verdict("storage memory_bytes", values, lives=lives).words == "does not grow"
    leaking = values + np.where(np.arange(400) < 100, 0.0, 2e4 * (STEPS - STEPS[100]))
    found = verdict("storage memory_bytes", leaking, lives=lives)
    assert found.words == "grows beyond what is stated"
    assert found.growth.per_step == pytest.approx(2e4, rel=0.1)


def test_a_restart_does_not_hide_a_leak():
    lives = ["1"] * 250 + ["2"] * 150  # the second starts small again
    values = 300 * MIB + np.where(np.arange(400) < 250, 2e4 * STEPS, 2e4 * (STEPS - STEPS[250]))
    found = verdict("learner memory_bytes", values, lives=lives)
    assert found.broken
    assert found.growth.per_step == pytest.approx(2e4, rel=0.1)


def test_what_outlives_processes_is_fitted_once_restarts_are_over():
    calm = np.arange(400) >= 320
    values = np.where(calm, 20.0, 20.0 + np.arange(400))
    assert verdict("nats subscriptions", values, calm=calm).words == "does not grow"
    found = verdict("nats subscriptions", values + STEPS * 0.01, calm=calm)
    assert found.words == "grows beyond what is stated"


@pytest.mark.parametrize(
    ("bytes_a_group", "words"),
    [(0.0, "does not grow"), (60.0, "grows as stated"), (150.0, "grows beyond what is stated")],
)
def test_the_ledger_may_grow_with_groups_as_far_as_is_stated(bytes_a_group, words):
    found = verdict("disk ledger bytes", MIB + 2 * bytes_a_group * STEPS)
    assert found.words == words
    assert found.stated_by_six_weeks == pytest.approx(1.5 * 60 * 2 * SIX_WEEKS_STEPS)


def test_growth_that_is_stated_without_a_figure_breaks_nothing():
    found = verdict("disk data bytes", 1000.0 * STEPS)
    assert (found.words, found.stated_by_six_weeks) == ("grows as stated", inf)
    assert found.to_json()["stated_by_six_weeks"] is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.minimum(STEPS * 5000.0, 15.9 * MIB), "within its bound"),
        (STEPS * 500.0, "grows towards its bound"),
        (np.minimum(STEPS * 5000.0, 16.1 * MIB), "above its bound"),
    ],
)
def test_a_stream_is_held_against_its_bound(values, words):
    assert verdict("nats EVENTS bytes", values).words == words


def test_few_samples_tell_nothing_and_much_noise_says_so():
    one = Sample(0.0, 5, True, {"learner": "1"}, {"learner threads": 4.0})
    [found] = judge([one, one], EACH_STEP, STREAM_BOUNDS)
    assert (found.words, found.growth, found.broken) == ("too short to tell", None, False)
    wide = np.random.default_rng(5).permutation(np.repeat(np.arange(24), 17)[: len(STEPS)]) * 1e3
    blocks = np.repeat(np.random.default_rng(6).random(40) * 400 * MIB, 10)
    assert verdict("learner memory_bytes", blocks).words == "too noisy to tell"
    assert not verdict("learner memory_bytes", wide).broken


def test_the_report_names_what_breaks_a_statement_first():
    leak = verdict("learner memory_bytes", 1e4 * STEPS)
    flat = verdict("learner threads", 4.0 + 0 * STEPS)
    memory = verdict("actors memory_bytes", 4.0 + 0 * STEPS)
    counts = {"steps": 19_950, "minutes": 1, "evaluations": 2, "data_switches": 3, "guests": 4, "restarts": 5}
    console = Console(record=True, width=150, file=StringIO())
    print_report(counts, [memory, flat, leak], console)
    text = console.export_text()
    assert text.index("learner memory_bytes") < text.index("actors memory_bytes")
    assert "learner threads" not in text
    assert "does not grow: 2" in text
    assert "grows beyond what is stated" in text
    json.dumps([flat.to_json(), leak.to_json()], allow_nan=False)


def test_what_is_allowed_is_what_the_documentation_states():
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    bounds = re.sub(r"\s+", " ", page.partition("## Bounds")[2])
    missing = [one.sentence for one in statements.STATED if one.sentence not in bounds]
    assert bounds
    assert not missing


@pytest.mark.parametrize(
    ("path", "sort"),
    [
        ("metrics.jsonl", "metrics"), ("counters.1.jsonl", "counters"), ("ledger.sqlite-wal", "ledger"),
        (".ledger.sqlite.lock", "ledger"), ("checkpoints/step_00000050/common.pt", "checkpoints"),
        ("replay/shard_00/segment_00000000-00000047/group.zip", "replay/segment"),
        ("replay/shard_01/retired_00000000", "replay/retired"), ("replay/shard_01/.index", "replay/index"),
        ("bus/jetstream/$G/streams/x/msgs/1.blk", "bus/jetstream"), ("bus/nats.log", "bus/nats"),
    ],
)  # fmt: skip
def test_files_are_told_apart_by_their_sort(path, sort):
    assert sort_of_file(Path(path)) == sort


def test_a_directory_is_counted_by_sort(tmp_path):
    (tmp_path / "data").mkdir()
    for name, size in (("metrics.jsonl", 10), ("metrics.1.jsonl", 20), ("data/a.jsonl", 5)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert sample_disk(tmp_path) == {
        "disk metrics bytes": 30, "disk metrics files": 2, "disk data bytes": 5, "disk data files": 1,
    }  # fmt: skip


async def test_processes_are_sampled_with_their_children():
    script = (
        "import sys; held = bytearray(30 << 20); files = [open('/dev/null') for _ in range(20)]; print(1)"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"{script}; sys.stdout.flush(); sys.stdin.read()",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            await child.stdout.readline()
        lives, values = sample_processes(child.pid)
    finally:
        child.kill()
        await child.communicate()
    [name] = lives
    assert lives[name].startswith(f"{child.pid}@")
    assert 30 * MIB < values[f"{name} memory_bytes"] < 100 * MIB
    assert values[f"{name} descriptors"] >= 23
    assert values[f"{name} threads"] == 1
    assert sample_processes(child.pid) == ({}, {})  # it has ended


@pytest.mark.nats
async def test_the_server_says_what_its_streams_hold(tmp_path):
    from nats.aio.client import Client

    port = free_port(HTTP_HOST)
    assert sample_bus(port) == {}  # nobody answers yet
    async with NatsServer(tmp_path, http_port=port) as server:
        client = Client()
        await client.connect(server.url)
        js = client.jetstream()
        await js.add_stream(name="run-EVENTS", subjects=["events"])
        await js.publish("events", b"x" * 1000)
        values = await asyncio.to_thread(sample_bus, port)
        await client.close()
    assert values["nats EVENTS messages"] == 1
    assert values["nats EVENTS bytes"] >= 1000
    assert values["nats connections"] == 1
    assert values["nats subscriptions"] >= 1
    assert values["nats streams"] == 1


@pytest.mark.nightly
@pytest.mark.nats
@pytest.mark.timeout(1200)  # most of it are processes that start, slowly where others do, too
async def test_a_short_compressed_run_restarts_every_part_and_accounts_for_every_series(tmp_path):
    report, verdicts = await run_compressed(1.0, 0, tmp_path, asyncio.Event())
    named = {verdict.series for verdict in verdicts}
    for part in ("local", "bus", "nats-server", "storage", "actors", "learner"):
        assert {f"{part} memory_bytes", f"{part} descriptors", f"{part} threads"} <= named
    assert {"nats EVENTS bytes", "nats consumers", "disk ledger bytes", "disk replay/segment files"} <= named
    assert report["restarts"] >= 5
    assert report["data_switches"] >= 1
    assert report["guests"] >= 1
    assert report["steps"] > 0
    assert (tmp_path / "samples.jsonl").read_text().count("\n") == report["samples"]
    assert [v for v in verdicts if v.growth is not None]
    for flat in ("nats streams", "nats consumers", "disk checkpoints files"):  # these hold in any run
        assert not next(verdict for verdict in verdicts if verdict.series == flat).broken, flat
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
    assert not [command for command in left if str(tmp_path) in " ".join(command or [])]
