"""What `launch bench overlap` reads in a run's record, and what it refuses there."""

import asyncio
import random

import pytest

from bus.errors import ConfigError, SluiceError
from launch.bench_overlap import Heard, Plan, Turn, _until
from launch.harm import Victim
from launch.metrics import append_records
from launch.overlap_settings import defaults, make, settings
from storage.run import RunDirectory


def step(number, time_s):
    return {"source": "learner-1", "step": number, "time_s": time_s, "train/stage": "rl"}


def reading(source, time_s, busy_s):
    return {"source": source, "step": 0, "time_s": time_s, "engine/busy_s": busy_s, "engine/count": 1}


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path, "overlap")


def test_counters_are_read_between_the_ends_of_two_steps_though_lines_come_twice(run):
    lines = [reading("actors-1", 0.0, 0.0), step(1, 10.0), reading("actors-1", 20.0, 10.0), step(2, 20.0)]
    append_records(run.metrics, [*lines, *lines[:3]])
    heard = Heard.of(run)
    assert heard.counted("engine/busy_s", Turn("async", 1, 2)) == 5.0
    assert heard.has_read_after(2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([step(1, 10.0), step(2, 20.0), step(1, 30.0)], "step 1 was trained twice"),
        (
            [reading("actors-1", 1.0, 1.0), reading("actors-2", 2.0, 0.0)],
            "again .actors-1, actors-2",
        ),
    ],
)
def test_a_part_that_died_ends_the_measurement(run, lines, message):
    append_records(run.metrics, lines)
    with pytest.raises(SluiceError, match=message):
        Heard.of(run)


async def test_a_wait_ends_at_its_limit_and_at_once_when_stopped(run):
    local, stop = Victim(run, (), random.Random(0)), asyncio.Event()
    append_records(run.metrics, [step(7, 1.0)])
    with pytest.raises(SluiceError, match="step 7 was the last"):
        await _until(local, lambda heard: heard.step > 7, stop, 0.0)
    stop.set()
    with pytest.raises(SluiceError, match="stopped"):
        await _until(local, lambda heard: heard.step > 7, stop, 600.0)


def test_every_other_round_begins_with_the_other_mode():
    assert Plan(steps=1, rounds=3).modes == ["async", "sync", "sync", "async", "async", "sync"]


@pytest.mark.parametrize(
    ("layers", "tokens", "message"),
    [
        ({"bus": {"url": "nats://there:4222"}}, 16, "--bus.url nats://there:4222"),
        ({"admission": {"max_staleness": 0}}, 16, "--admission.max-staleness 0"),
        ({"model": {"path": "no/model"}}, 16, "--model.path no/model: there is no model"),
        ({"data": {"prompts": "no/prompts"}}, 16, "--data.prompts no/prompts: there is no file"),
        ({}, 0, "--prompt-tokens 0"),
        ({}, 4096 - 192 - 1, "--prompt-tokens 3903: .* context of 4096"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(tmp_path, layers, tokens, message):
    below = defaults("tiny", tmp_path, devices={})
    with pytest.raises(ConfigError, match=message):
        settings(layers, below, "tiny", prompt_tokens=tokens)
    assert list(tmp_path.iterdir()) == []


def test_only_what_the_user_did_not_name_is_made(tmp_path):
    directory, own = tmp_path / "run", tmp_path / "mine.jsonl"
    own.write_text("mine")
    below = defaults("tiny", directory, devices={})
    config = settings({"data": {"prompts": own}}, below, "tiny", prompt_tokens=4096 - 192 - 2)
    make(config, "tiny", prompt_tokens=16)
    assert own.read_text() == "mine"
    assert [path.name for path in directory.iterdir()] == ["model"]
