"""Tests what `launch bench overlap` reads in a run's record, and what it refuses there."""

import asyncio
import json
from math import inf

import pytest

from benchmarks.commands.parts import age_of_process
from benchmarks.overlap import LimitError, Measurement, Plan, end_run, measured
from benchmarks.overlap_record import Heard, Turn
from benchmarks.overlap_report import trained
from benchmarks.overlap_settings import defaults, make, settings
from bus.connection.status import Activity, report_status
from bus.errors import ConfigError, SluiceError
from bus.messages import RunRecord
from launch.process.settings_revision import refuse_unapplied
from launch.settings.run_config import validate
from soak.local_run import LocalRun
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import append_records

STALENESS, BURST, SETTLED = 2, 3, 6


def step(number, time_s, staleness=STALENESS, seconds=1.0):
    return {
        "source": "learner-1", "step": number, "time_s": time_s, "train/stage": "rl",
        "train/trajectories": 16, "train/tokens": 100, "time/step_s": seconds,
        "time/waiting_for_batch_s": 0.0, "time/publish_stall_s": 0.0,
        "staleness/max_versions": staleness, "staleness/mean_versions": staleness,
    }  # fmt: skip


def reading(source, time_s, busy_s):
    return {
        "source": source, "step": 0, "time_s": time_s, "engine/count": 1,
        "engine/busy_s": busy_s, "engine/request_s": busy_s, "engine/tokens": busy_s,
    }  # fmt: skip


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
        ([reading("actors-1", 1.0, 1.0), reading("actors-2", 2.0, 0.0)], "again .actors-1, actors-2"),
    ],
)
def test_a_part_that_died_ends_the_measurement(run, lines, message):
    append_records(run.metrics, lines)
    with pytest.raises(SluiceError, match=message):
        Heard.of(run)


def steps(first, last, *, began_s=0.0, seconds=1.0, staleness=STALENESS, read=True):
    """Steps that take so long each, and the actors' counters after each."""
    return timed(first, began_s, [seconds] * (last - first + 1), staleness=staleness, read=read)


def bursts(first, last, *, began_s=0.0):
    """Asynchronous steps as they come: the first of a burst waits for all of it."""
    return timed(first, began_s, [(4.0, 1.0, 1.0)[n % BURST] for n in range(last - first + 1)])


def timed(first, time_s, each_s, *, staleness=STALENESS, read=True):
    records = []
    for number, seconds in enumerate(each_s, first):
        time_s += seconds
        records.append(step(number, time_s, staleness, seconds))
        if read:
            records.append(reading("actors-1", time_s, time_s))
    return records


class Scripted(LocalRun):
    """A run that has no processes: storage's restart makes it say what it says next."""

    async def restart_storage(self, settings):
        assert settings["admission"]["max_staleness"] in (0, STALENESS)
        append_records(self.run.metrics, self.next)


@pytest.fixture
def measurement(run, tmp_path):
    """Builds one of a run that has said `records`, and says `then` when its mode has changed."""

    def build(records, then=(), *, stopped=False, rounds=1, **plan):
        append_records(run.metrics, records)
        run.config.write_text(json.dumps({"admission": {"max_staleness": STALENESS}}))
        local, stop = Scripted(run, ()), asyncio.Event()
        local.next = then
        if stopped:
            stop.set()
        layers = {"admission": {"max_staleness": STALENESS}}
        config = settings(layers, defaults("tiny", tmp_path, devices={}), "tiny", prompt_tokens=16)
        return Measurement(local, config, Plan(rounds=rounds, **plan), stop)

    return build


async def test_a_wait_ends_when_it_has_taken_too_long_and_at_once_when_stopped(measurement):
    waiting = measurement([step(7, 1.0)], steps=1)
    with pytest.raises(SluiceError, match="step 7 was the last"):
        await waiting.until(lambda heard: heard.step > 7, 0.0)
    waiting = measurement([], stopped=True, steps=1)
    with pytest.raises(SluiceError, match="stopped before the first turn had settled, and step 7 was"):
        await waiting.until(lambda heard: heard.step > 7, 600.0)


@pytest.mark.parametrize(
    ("plan", "failure", "said"),
    [
        (
            {"limit_s": 0.001},
            LimitError,
            "the limit of 0.001 s came while async was measured, from step 6 on",
        ),
        ({"stopped": True}, SluiceError, "stopped while async was measured, from step 6 on, and step 12"),
    ],
)
async def test_an_asynchronous_turn_that_is_cut_counts_with_its_whole_bursts(
    measurement, plan, failure, said
):
    known = bursts(1, SETTLED + BURST + 2)
    cut = measurement([*known, step(SETTLED + BURST + 3, 24.0)], steps=10, **plan)
    ended = await cut.run()
    assert type(ended) is failure
    assert said in str(ended)
    found = measured(cut, ended)
    [turn] = found["absolute"]["turns"]
    assert (turn["mode"], turn["settling_steps"], turn["first"]) == ("async", SETTLED, SETTLED)
    assert (turn["last"], turn["cut"]) == (SETTLED + BURST, True)
    assert (turn["settling_s"], turn["step_s"], turn["trajectories_per_s"]) == (12.0, [4.0, 1.0, 1.0], 8.0)
    assert found["ratios"] == {
        "async_over_sync": None, "learner_idle": 0.0, "engine_idle": 0.0,
        "slots_idle": found["modes"]["async"]["slots_idle"],
    }  # fmt: skip
    assert (found["modes"]["sync"], found["absolute"]["async_over_sync_tokens"]) == (None, None)


@pytest.mark.parametrize(
    ("mode", "wanted", "known", "counted"),
    [("async", 9, 2, 0), ("async", 9, 5, 3), ("async", 2, 2, 2), ("sync", 9, 1, 0), ("sync", 9, 2, 2)],
)
def test_of_a_turn_that_was_cut_a_part_counts_that_is_like_the_whole(run, mode, wanted, known, counted):
    append_records(run.metrics, steps(1, 4 + known))
    turns = trained(Heard.of(run), [Turn(mode, 4, 4 + wanted)], burst=BURST)
    assert [(turn.first, len(turn.steps), turn.cut) for turn in turns] == (
        [(4, counted, counted < wanted)] if counted else []
    )


async def test_a_cut_in_the_synchronous_turn_leaves_the_ratio(measurement):
    settling = steps(10, 13, began_s=18.0)
    synchronous = steps(14, 17, began_s=22.0, seconds=8.0, staleness=0)
    cut = measurement(bursts(1, 9), [*settling, *synchronous], steps=3, limit_s=0.001)
    ended = await cut.run()
    assert "came while sync was measured, from step 15 on, and step 17 was the last" in str(ended)
    found = measured(cut, ended)
    assert found["ratios"]["async_over_sync"] == found["absolute"]["async_over_sync_tokens"] == 4.0
    turns = [(turn["mode"], turn["first"], turn["last"], turn["cut"]) for turn in found["absolute"]["turns"]]
    assert turns == [("async", 6, 9, False), ("sync", 15, 17, True)]


async def test_a_cut_while_the_mode_settles_says_so(measurement):
    cut = measurement(steps(1, 8), steps(9, 11, began_s=8.0), steps=2, limit_s=0.001)
    ended = await cut.run()
    assert "came while sync settled, from step 8 on, and step 11 was the last" in str(ended)
    assert [turn["mode"] for turn in measured(cut, ended)["absolute"]["turns"]] == ["async"]


async def test_one_step_that_is_on_policy_by_chance_does_not_settle_the_synchronous_mode(measurement):
    by_chance, staler = steps(10, 10, began_s=9.0, staleness=0), steps(11, 11, began_s=10.0)
    after = [*steps(9, 9, began_s=8.0), *by_chance, *staler, *steps(12, 15, began_s=11.0, staleness=0)]
    whole = measurement(steps(1, 8), after, steps=2)
    assert await whole.run() is None
    assert [(turn.mode, turn.after, turn.first, turn.last) for turn in whole.turns] == [
        ("async", 0, 6, 8),
        ("sync", 8, 13, 15),
    ]


async def test_a_turn_begins_after_the_actors_counters_were_first_heard(measurement):
    late = measurement([*steps(1, 8, read=False), *steps(9, 13, began_s=8.0)], steps=4, limit_s=0.001)
    await late.run()
    assert [(turn.first, turn.last) for turn in late.turns] == [(9, 13)]


@pytest.mark.nats
async def test_storage_that_starts_with_another_bound_is_not_refused_while_the_learner_lives(bus, run):
    layer = {"run": "test", "bus": {"url": bus.client.connected_url.geturl()}}
    before, other = (validate({**layer, "admission": {"max_staleness": bound}}) for bound in (STALENESS, 0))
    await bus.put("run", RunRecord(name="test", config_json=before.model_dump_json()))
    stop = asyncio.Event()
    learner = report_status(bus, source="learner", role="learner", look=lambda: Activity("works"), stop=stop)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(learner)
        await LocalRun(run, ()).restart_storage(json.loads(other.model_dump_json()))
        asked = validate(json.loads(run.asked_config.read_text()))
        await refuse_unapplied(bus, asked)
        stop.set()
    assert asked.admission.max_staleness == 0


async def test_changing_back_to_the_same_mode_is_no_change(measurement):
    after = [*steps(9, 11, began_s=8.0), *steps(12, 18, began_s=11.0, staleness=0)]
    whole = measurement(steps(1, 8), after, steps=2, limit_s=0.001, rounds=2)
    await whole.run()
    settled = [(turn.mode, turn.after, turn.first, turn.last) for turn in whole.turns]
    assert settled == [("async", 0, 6, 8), ("sync", 8, 13, 15), ("sync", 15, 15, 17)]


@pytest.mark.parametrize(
    ("records", "where"),
    [
        ([], "before the first step, and step 0"),
        (bursts(1, 5), "before the first turn had settled, and step 5"),
        (bursts(1, 8), "while async was measured, from step 6 on, and step 8"),
        (steps(1, 9, read=False), "before the first turn had settled, and step 9"),
        (
            [*steps(1, 6), *steps(7, 9, began_s=6.0, read=False)],
            "while async was measured, from step 6 on, and step 9",
        ),
    ],
)
async def test_a_cut_before_a_burst_is_known_is_an_error(measurement, records, where):
    cut = measurement(records, steps=10, limit_s=0.001)
    ended = await cut.run()
    with pytest.raises(SluiceError, match=f"nothing was measured: the limit of 0.001 s came {where} was"):
        measured(cut, ended)


async def test_a_stop_while_the_run_ends_waits_for_nothing(run):
    class Lasting(LocalRun):
        async def end(self, timeout_s: float = 0.0) -> None:
            stop.set()
            await asyncio.Event().wait()

    stop = asyncio.Event()
    async with asyncio.timeout(30):
        ended = await end_run(Lasting(run, ()), Plan(steps=1, rounds=1), stop)
    assert ended == "killed: stopped while the run ended"


@pytest.mark.parametrize(
    ("limit_s", "measuring_s", "ending_s"),
    [(1000, 880, 950), (440, 373, 418), (100, 50, 95), (10, 5, 9.5), (inf, inf, inf)],
)
def test_the_end_of_the_run_has_its_time_within_the_limit(limit_s, measuring_s, ending_s):
    plan = Plan(steps=1, rounds=1, limit_s=limit_s)
    assert (plan.measuring_s, plan.ending_s) == pytest.approx((measuring_s, ending_s))


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
    directory, own, model = tmp_path / "run", tmp_path / "mine.jsonl", tmp_path / "model"
    own.write_text("mine")
    below = defaults("tiny", directory, devices={})
    config = settings({"data": {"prompts": own}}, below, "tiny", prompt_tokens=4096 - 192 - 2)
    make(config, "tiny", prompt_tokens=16)
    assert own.read_text() == "mine"
    assert [path.name for path in directory.iterdir()] == ["model"]
    (directory / "model").rename(model)
    directory.rmdir()
    config = settings({"data": {"prompts": own}, "model": {"path": model}}, below, "tiny", prompt_tokens=16)
    make(config, "tiny", prompt_tokens=16)
    assert list(directory.iterdir()) == [], "it is there for the run's configuration"


@pytest.mark.parametrize(("created_s", "age_s"), [(997.0, 3.0), (1100.0, 0.0), (-1e9, 60.0)])
def test_the_age_of_a_process_is_believed_within_reason(created_s, age_s):
    assert age_of_process(created_s, 1000.0) == age_s
