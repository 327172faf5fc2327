"""Tests what `launch bench staleness` and `reuse` do without a run: cells, figures, tables, schedule."""

import asyncio
import json
import re
from dataclasses import replace
from functools import partial
from math import inf, isnan, nan
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from benchmarks.commands import learning, length, off_policy
from benchmarks.off_policy import cell_run
from benchmarks.off_policy.bench import measure_cells, write_report
from benchmarks.off_policy.cell_run import base_settings, digest, settings_of
from benchmarks.off_policy.cells import LAGS, METHODS, SEEDS, Cell, chosen_methods, grid
from benchmarks.off_policy.outcome import Outcome, outcome_of
from benchmarks.off_policy.paired import Retrained, figures, objective
from benchmarks.off_policy.report import held, report, reuse_table, saved_fraction, staleness_tables
from benchmarks.whole_runs.cells import chosen_numbers
from benchmarks.whole_runs.curves import smoothed, steps_to_target
from benchmarks.whole_runs.extent import Plan
from benchmarks.whole_runs.page import between, refuse_without_place, write_between
from benchmarks.whole_runs.results import Results
from benchmarks.whole_runs.run import ONE_THREAD
from benchmarks.whole_runs.schedule import Schedule
from benchmarks.whole_runs.spread import Spread
from bus.errors import ConfigError, SluiceError
from launch.cli import main as cli
from launch.settings.run_config import RunConfig, resolve

pytestmark = pytest.mark.slow

CELL = Cell(seed=0, reuse=1, lag=2, method="token_tis")


def outcome(method="token_tis", lag=2, *, seed=0, reuse=1, reaches=50, final=0.95) -> Outcome:
    """An outcome whose accuracy rises evenly to 0.9 at step `reaches`, and then is `final`."""
    steps = tuple(range(0, 151, 5))
    accuracy = tuple(0.9 * step / reaches if step <= reaches else final for step in steps)
    return Outcome(
        method=method, lag=lag, reuse=reuse, seed=seed, settings="s", wall_s=1.0,
        evaluated_steps=steps, sampled=accuracy, greedy=accuracy,
        generated_tokens=tuple(1000.0 * step / reuse for step in steps),
        rewards=(0.5,) * 150, staleness=(*map(float, range(lag)), *(float(lag),) * (150 - lag)),
        tokens_by_staleness=tuple(float(edge == lag) for edge in (*LAGS, inf)),
        ess=(0.5,) * lag + (0.9,) * (150 - lag), k3=(0.0,) * 150,
    )  # fmt: skip


# --- which cells there are ---


def test_a_seed_is_complete_before_the_next_one_begins():
    cells = grid(METHODS, LAGS, (1,), SEEDS)
    of_a_seed = len(METHODS) * len(LAGS)
    assert len(cells) == len(set(cells)) == 3 * of_a_seed
    assert [cell.seed for cell in cells] == [0] * of_a_seed + [1] * of_a_seed + [2] * of_a_seed
    assert len({cell.name for cell in cells}) == len(cells)


def test_nothing_is_to_be_used_more_often_than_there_are_versions_for_it():
    cells = grid(["none"], (0, 1, 3), (1, 2, 4), (0,))
    assert [(cell.reuse, cell.lag) for cell in cells] == [(1, 0), (1, 1), (1, 3), (2, 1), (2, 3), (4, 3)]


def test_filters_keep_the_order_of_the_tables_and_name_what_there_is_not():
    assert chosen_methods(" vespo,none ") == ("none", "vespo")
    assert chosen_methods("") == tuple(METHODS)
    assert chosen_numbers("--lags", "8, 0,8", LAGS) == (0, 8)
    assert chosen_numbers("--lags", "", LAGS) == LAGS
    with pytest.raises(ConfigError, match="did you mean 'token_tis'"):
        chosen_methods("token_tsi")
    with pytest.raises(ConfigError, match="--lags eight: give whole numbers"):
        chosen_numbers("--lags", "eight", LAGS)
    with pytest.raises(ConfigError, match="from 0 upwards"):
        chosen_numbers("--seeds", "0,-1", SEEDS)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_a_configuration_that_a_run_takes(method, tmp_path):
    base = base_settings({}, tmp_path, steps=7)
    config = settings_of(Cell(1, 2, 4, method), base, tmp_path)
    again = settings_of(Cell(1, 2, 4, method), json.loads(config.model_dump_json()), tmp_path)
    assert config == again  # also `truncation_cap = inf` passes through the file
    assert (config.seed, config.learner.steps, config.learner.batch.updates) == (1, 7, 2)
    assert (config.admission.max_staleness, config.admission.exact_staleness) == (4, True)
    assert (config.admission.sampler.max_reuse, config.admission.sampler.min_samples_per_insert) == (2, 2.0)


def test_methods_differ_from_each_other(tmp_path):
    base = base_settings({}, tmp_path, steps=7)
    learners = {settings_of(Cell(0, 1, 4, m), base, tmp_path).learner.model_dump_json() for m in METHODS}
    assert len(learners) == len(METHODS)


def test_the_digest_is_that_of_settings_and_model_wherever_they_lie(tmp_path):
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)

    def of(name: str, steps: int = 7) -> str:
        return digest(base_settings({}, tmp_path / name, steps=steps), tmp_path / name)

    assert of("a") == of("b") != of("c")
    assert of("a") != of("a", steps=8)


def test_a_further_setting_of_a_later_build_leaves_outcomes_comparable(tmp_path, monkeypatch):
    class Later(RunConfig):
        further: int = 3

    (tmp_path / "model.safetensors").write_bytes(b"1")
    base = base_settings({}, tmp_path, steps=7)
    before = digest(base, tmp_path)
    now = cell_run.resolve(base, {"model": {"path": None}}).model_dump()
    for further, same in ((3, True), (4, False)):
        monkeypatch.setattr(
            cell_run, "resolve", lambda *_, further=further: Later.model_validate(now | {"further": further})
        )
        assert (digest(base, tmp_path) == before) == same


def test_types_that_differ_in_nothing_else_are_not_comparable(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1")

    def of(loss: dict) -> str:
        return digest(base_settings({"learner": {"loss": loss}}, tmp_path, steps=7), tmp_path)

    types = "reinforce", "cispo", "clip_cov"
    assert len({of({"type": name}) for name in types}) == len(types)
    assert of({"type": "reinforce"}) == digest(base_settings({}, tmp_path, steps=7), tmp_path)


@pytest.mark.parametrize("stream", METHODS)
def test_every_method_can_be_trained_on_the_stream_of_any_other(stream, tmp_path):
    base = base_settings({}, tmp_path, steps=7)
    recorded = settings_of(Cell(0, 1, 4, stream), base, tmp_path)
    for method in METHODS:
        changed = resolve(recorded.model_dump(), {"learner": objective(method)}).learner
        wanted = settings_of(Cell(0, 1, 4, method), base, tmp_path).learner
        assert (changed.used_loss, changed.used_correction) == (wanted.used_loss, wanted.used_correction)
        assert changed.rejection == wanted.rejection
        assert changed.used_aggregation == wanted.used_aggregation
        assert wanted.differences_from_papers == []


def test_what_a_method_made_of_the_stream_is_told_by_its_last_tenth():
    row = Retrained("none", True, 0.5, entropy=(1.0,) * 18 + (0.5, 0.3), grad_norm=(1.0,) * 19 + (3.0,))
    assert figures(row) == {
        "method": "none", "batches_equal": True, "accuracy": 0.5, "entropy_end_nats": 0.4,
        "grad_norm_end": 2.0, "grad_norm_mean": 1.1,
    }  # fmt: skip


# --- what a run was like ---


def test_smoothing_averages_each_evaluation_with_its_neighbours():
    assert smoothed([0.0, 0.3, 0.9]) == pytest.approx([0.15, 0.4, 0.6])


def test_steps_to_the_target_lie_on_the_line_between_two_evaluations():
    assert steps_to_target([0, 5, 10, 15], [0.1, 0.5, 0.9, 0.2], 0.7) == pytest.approx(7.5)
    assert steps_to_target([0, 5], [0.95, 0.5], 0.9) == 0.0
    assert isnan(steps_to_target([0, 5], [0.1, 0.5], 0.9))


def test_figures_are_of_the_steady_state_and_of_smoothed_accuracy():
    found = outcome(lag=2, reaches=50, final=0.96).figures()
    assert found["staleness_mean"] == 2.0  # (0, 1, 2, 2, ...) without the first two steps
    assert (found["ess_mean"], found["ess_lowest"], found["tokens_in_bin"]) == pytest.approx((0.9, 0.9, 1.0))
    assert found["accuracy_at_100"] == found["accuracy_end"] == pytest.approx(0.96)
    # smoothed: 0.81 at 45, (0.81 + 0.9 + 0.96) / 3 = 0.89 at 50, (0.9 + 0.96 + 0.96) / 3 = 0.94 at 55
    assert found["steps_to_target"] == pytest.approx(51.0)
    assert found["tokens_to_target"] == pytest.approx(51_000.0)


def test_what_was_not_reached_is_not_a_number():
    short = replace(outcome(final=0.5), evaluated_steps=tuple(range(0, 62, 2)))
    assert isnan(short.figures()["accuracy_at_100"])
    assert isnan(short.figures()["steps_to_target"])
    assert isnan(short.figures()["tokens_to_target"])


def records() -> list[dict]:
    step = {
        "train/stage": "rl", "kind": "metrics", "source": "learner", "reward/mean": 0.25,
        "policy/ess_fraction": 0.75, "policy/k3_nats": 0.125,
    }  # fmt: skip
    bins = {f"policy/stale_tokens_{edge}": 0.0 for edge in (*LAGS, "more")}
    counters = [{"engine/busy_s": 0.0, "time_s": t, "engine/tokens": 100.0 * t} for t in (0.0, 40.0)]
    evaluations = [
        {"kind": "evaluation", "step": n, "sampled": 0.1 * n, "greedy": 0.2 * n, "time_s": 99.0}
        for n in (0, 2)
    ]
    own = [
        {"step": n, "time_s": 10.0 * n, "staleness/mean_versions": lag, f"policy/stale_tokens_{lag}": 1.0}
        for n, lag in ((1, 0), (2, 1), (3, 2), (4, 2))
    ]
    steps = [step | bins | values for values in own]
    return [*evaluations, *reversed(steps), *counters, {"train/stage": "warmup", "step": 9}]


def test_an_outcome_is_read_from_the_record_of_a_run():
    found = outcome_of(CELL, records(), settings="s", wall_s=1.25)
    assert found.cell == CELL
    assert found.staleness == (0.0, 1.0, 2.0, 2.0)
    assert found.tokens_by_staleness == (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # steps 3 and 4
    assert (found.evaluated_steps, found.sampled, found.greedy) == ((0, 2), (0.0, 0.2), (0.0, 0.4))
    assert found.generated_tokens == (0.0, 2000.0)  # when step 2 ended, not when it was evaluated
    assert (found.rewards, found.ess, found.k3) == ((0.25,) * 4, (0.75,) * 4, (0.125,) * 4)
    assert Outcome.of_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_record_without_evaluations_is_refused():
    rows = [row for row in records() if row.get("kind") != "evaluation"]
    with pytest.raises(SluiceError, match="4 steps, 0 evaluations and 2 counters"):
        outcome_of(CELL, rows, settings="s", wall_s=1.0)


# --- results ---


def test_results_go_on_after_a_line_that_was_cut_off(tmp_path: Path):
    results = Results(tmp_path / "new" / "cells.jsonl", Outcome.of_json)
    results.add(outcome(seed=0))
    with results.path.open("a") as file:
        file.write('{"method": "no')
    Results(results.path, Outcome.of_json).add(outcome(seed=1))
    assert [cell.seed for cell in Results(results.path, Outcome.of_json).outcomes] == [0, 1]


def test_outcomes_of_other_settings_are_named_and_measured_again_beside_their_lines(tmp_path: Path):
    results = Results(tmp_path / "cells.jsonl", Outcome.of_json)
    results.add(outcome())
    results.leave_out_others(lambda _: "s")
    assert list(results.outcomes) == [outcome().cell]
    with capture_logs() as logs:
        results.leave_out_others(lambda _: "t")
    assert results.outcomes == {}
    assert [line["cells"] for line in logs] == results.left_out == [outcome().cell.name]
    results.add(replace(outcome(), settings="t"))
    for settings in ("s", "t"):
        again = Results(tmp_path / "cells.jsonl", Outcome.of_json)
        again.leave_out_others(lambda _, wanted=settings: wanted)
        assert [one.settings for one in again.outcomes.values()] == [settings]


# --- over seeds ---


def test_a_spread_counts_what_was_never_reached_as_infinite():
    spread = Spread.of([nan, 40.0, 60.0])
    assert (spread.middle, spread.lowest, spread.highest) == (60.0, 40.0, inf)
    assert spread.to_json() == {"median": 60.0, "lowest": 40.0, "highest": None, "seeds": 3, "reached": 2}
    assert spread.text(".0f") == "60 (2/3)"
    assert Spread.of([nan, nan, 40.0]).text(".0f") == "- (1/3)"
    assert Spread.of([40.0, 45.0, 60.0]).text(".0f") == "45±10"
    assert Spread.of([nan]).text(".0f") == "-"
    assert Spread.of([0.5]).text(".2f") == "0.50"


def test_the_report_compares_with_on_policy_and_says_what_holds():
    cells = [
        outcome("token_tis", 0, reaches=50),
        outcome("token_tis", 8, reaches=60),
        outcome("none", 8, reaches=200),
        outcome("none", 32, reaches=55),  # no correction: does not count
        outcome("vespo", 32, reaches=125),
    ]
    shown = report(cells)["shown"]
    assert shown["token_tis_at_8_over_on_policy"]["value"] == pytest.approx(61 / (50 + 10 / 7))
    assert shown["token_tis_at_8_over_on_policy"]["holds"] is True
    assert shown["uncorrected_at_8_at_step_100"] == {
        "value": pytest.approx(0.45),
        "at_most": 0.6,
        "holds": True,
    }
    assert shown["best_at_32_over_on_policy"]["holds"] is False
    assert report([])["shown"]["best_at_32_over_on_policy"] == {"value": None, "at_most": 2.0, "holds": None}


def test_a_slope_beside_a_cliff_is_what_the_decoupled_loses_over_what_the_uncorrected_does():
    arms = {("none", 0): 50, ("none", 8): 200, ("decoupled", 0): 50, ("decoupled", 8): 110}
    cells = [outcome(method, lag, reaches=reaches) for (method, lag), reaches in arms.items()]
    found = report(cells)["shown"]["decoupled_lost_at_8_over_uncorrected"]
    # at step 100: 0.95 on-policy, 0.45 of the uncorrected, and 9/11 of the decoupled
    assert found == {"value": pytest.approx((0.95 - 9 / 11) / 0.5), "at_most": 0.25, "holds": False}
    cells[-1] = outcome("decoupled", 8, reaches=60)
    assert report(cells)["shown"]["decoupled_lost_at_8_over_uncorrected"]["holds"] is True
    assert report(cells[:3])["shown"]["decoupled_lost_at_8_over_uncorrected"]["holds"] is None


def test_a_method_that_never_learns_misses_its_bound():
    cells = [outcome("token_tis", 0), outcome("token_tis", 8, reaches=400)]
    assert report(cells)["shown"]["token_tis_at_8_over_on_policy"] == {
        "value": None, "at_most": 1.3, "holds": False,
    }  # fmt: skip


def test_a_cell_whose_staleness_was_not_held_is_named():
    late = replace(outcome(lag=4, seed=1), staleness=(3.4,) * 150)
    assert held(replace(late, staleness=(3.6,) * 150))
    assert report([outcome(lag=4), late])["staleness_not_held"] == ["token_tis-lag4-reuse1-seed1"]


def test_tables_have_a_row_for_each_method_and_a_column_for_each_lag():
    cells = [outcome("vespo", 8, seed=n, reaches=r) for n, r in ((0, 50), (1, 60), (2, 100))]
    steps = staleness_tables([*cells, outcome("none", 0, reaches=400)])
    assert re.findall(r"^\|.*", steps, re.MULTILINE) == [
        "| method | 0 | 8 |", "|---|---|---|", "| none | - |  |", "| vespo |  | 61±24 |",
    ]  # fmt: skip


def test_reuse_is_compared_with_the_same_method_and_bound():
    cells = [outcome(lag=4), outcome(lag=4, reuse=2, reaches=60)]
    table = reuse_table(cells)
    assert "| token_tis | 4 | 1 | 51,429 | 0% | 51 | 4.0 | 0.95 |" in table
    assert "| token_tis | 4 | 2 | 30,500 | 41% | 61 | 4.0 | 0.95 |" in table
    assert isnan(saved_fraction(None, Spread.of([1.0])))


def test_tables_replace_what_lies_between_their_marks():
    page = "a\n<!-- bench staleness -->\nold\n<!-- end -->\nb\n<!-- bench reuse -->\n<!-- end -->\n"
    filled = between(between(page, "reuse", "R\n"), "staleness", "S\\1\n")
    assert filled == (
        "a\n<!-- bench staleness -->\nS\\1\n<!-- end -->\nb\n<!-- bench reuse -->\nR\n<!-- end -->\n"
    )
    with pytest.raises(ConfigError, match="has no lines <!-- bench reuse -->"):
        between("nothing", "reuse", "")


def test_a_page_is_filled_and_one_that_cannot_be_read_is_refused(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- bench reuse -->\nold\n<!-- end -->\nb — c\n", encoding="utf-8")
    write_between(page, "reuse", "R\n")
    assert page.read_text(encoding="utf-8") == "a\n<!-- bench reuse -->\nR\n<!-- end -->\nb — c\n"
    refuse_without_place(page, "reuse")
    with pytest.raises(ConfigError, match=r"missing\.md: No such file or directory"):
        refuse_without_place(tmp_path / "missing.md", "reuse")
    with pytest.raises(ConfigError, match="Is a directory"):
        write_between(tmp_path, "reuse", "R\n")
    page.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        refuse_without_place(page, "reuse")


@pytest.mark.parametrize("name", ["staleness", "reuse", "learning", "length"])
def test_a_page_that_is_not_there_is_refused_before_anything_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = {"learning": learning, "length": length}.get(name, off_policy)
    monkeypatch.setattr(commands, "configure_logging", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", name, "--into", "missing.md"])
    assert ended.value.code == 2
    assert "--into missing.md: No such file or directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_pictures_and_tables_are_written_also_of_few_outcomes(tmp_path: Path):
    write_report("staleness", [outcome("none", 0, reaches=400), outcome("vespo", 8)], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "staleness.md", "staleness.png", "staleness_curves.png",
    }  # fmt: skip


# --- the schedule ---


def cells(count: int) -> list[Cell]:
    return [Cell(seed, 1, 2, "token_tis") for seed in range(count)]


async def test_so_many_cells_run_at_once_and_one_that_fails_stops_no_other():
    running, most, kept = 0, 0, []
    full = asyncio.Event()

    async def measure(cell: Cell, limit_s: float) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await asyncio.wait_for(full.wait(), 20)
        running -= 1
        if cell.seed == 1:
            raise SluiceError("it broke")
        return outcome(seed=cell.seed)

    schedule = Schedule(kept.append, cell_s=9.0)
    await schedule.run(cells(6), measure, parallel=3, stop=asyncio.Event())
    assert (most, schedule.done, schedule.failed) == (3, 5, {cells(6)[1].name: "it broke"})
    assert sorted(o.seed for o in kept) == [0, 2, 3, 4, 5]


async def test_no_cell_is_started_that_would_not_end_in_time(monkeypatch):
    now = 0.0
    monkeypatch.setattr("benchmarks.whole_runs.schedule.time.monotonic", lambda: now)
    limits = []

    async def measure(cell: Cell, limit_s: float) -> Outcome:
        nonlocal now
        limits.append(limit_s)
        now += 20.0
        return outcome(seed=cell.seed)

    schedule = Schedule(lambda o: None, cell_s=50.0, limit_s=80.0, began=0.0)  # 70 s, and 10 to spare
    await schedule.run(cells(9), measure, parallel=1, stop=asyncio.Event())
    assert (limits, schedule.done) == ([50.0, 50.0, 30.0], 3)


async def test_a_cell_that_was_cut_off_is_left_for_the_next_call_and_is_no_failure(monkeypatch):
    now = 0.0
    monkeypatch.setattr("benchmarks.whole_runs.schedule.time.monotonic", lambda: now)

    async def measure(cell: Cell, limit_s: float) -> Outcome:
        nonlocal now
        now += limit_s
        raise SluiceError("took too long")

    schedule = Schedule(lambda o: None, cell_s=500.0, limit_s=80.0, began=0.0)
    await schedule.run(cells(2), measure, parallel=1, stop=asyncio.Event())
    assert (schedule.done, schedule.failed) == (0, {})


async def test_a_later_call_measures_only_what_is_missing(tmp_path: Path, monkeypatch):
    Results(tmp_path / "cells.jsonl", Outcome.of_json).add(replace(outcome(seed=0), settings="s"))
    measured = []

    async def run_cell(cell, base, scratch, stop, *, settings, limit_s):
        measured.append(cell.seed)
        return outcome(seed=cell.seed)

    async def make_model(*_, **__) -> None: ...

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    for name, fake in (("run_cell", run_cell), ("make_model", make_model), ("digest", lambda *_: "s")):
        monkeypatch.setattr(f"benchmarks.off_policy.bench.{name}", fake)
    plan = Plan(cells(3), tmp_path, tmp_path / "cells.jsonl", {}, parallel=1, cell_s=9.0)
    measure = partial(measure_cells, kind="reuse", steps=5)
    none = await measure(replace(plan, limit_s=0.0), asyncio.Event())
    assert none["left"] == [cell.name for cell in cells(3)[1:]]
    found = await measure(plan, asyncio.Event())
    assert (measured, found["measured_now"], found["cells"], found["left"]) == ([1, 2], 2, 3, [])


async def test_cells_that_all_have_rows_of_other_settings_are_measured_or_said_to_be_uncompared(
    tmp_path, monkeypatch
):
    Results(tmp_path / "cells.jsonl", Outcome.of_json).add(replace(outcome(), settings="of before"))
    measured = []

    async def run_cell(cell, base, scratch, stop, *, settings, limit_s):
        measured.append(settings)
        return replace(outcome(), settings=settings)

    monkeypatch.setattr("benchmarks.off_policy.bench.run_cell", run_cell)
    plan = Plan(cells(1), tmp_path, tmp_path / "cells.jsonl", {}, parallel=1, cell_s=9.0)
    measure = partial(measure_cells, plan, kind="reuse", steps=5)
    with capture_logs() as said:
        found = await measure(asyncio.Event())
    assert [(line["event"], line["lacks"]) for line in said] == [
        ("outcomes_not_compared", str(tmp_path / "model"))
    ]
    assert (measured, found["of_other_settings"]) == ([], [])
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).touch()
    found = await measure(asyncio.Event())
    assert (len(measured), found["measured_now"], len(found["of_other_settings"])) == (1, 1, 1)
    assert (await measure(asyncio.Event()))["measured_now"] == 0


def test_a_run_uses_one_thread_and_no_gpu(tmp_path):
    config = settings_of(CELL, base_settings({}, tmp_path, steps=7), tmp_path)
    for part in ("learner", "actors"):
        assert config.supervision.environment[part] == ONE_THREAD
