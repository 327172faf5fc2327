"""Tests what `launch bench length` does without a run: task, cells, settings, figures, table, calls."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.episodes.task import Answer
from benchmarks.length import bench as bench_of_length
from benchmarks.length.bench import measure_cells, write_report
from benchmarks.length.cell_run import base_settings, digest, settings_of
from benchmarks.length.cells import CUT_OFF, HELD, LAGS, METHODS, SEEDS, Cell, grid
from benchmarks.length.completed import completed_only
from benchmarks.length.outcome import Outcome, outcome_of
from benchmarks.length.report import report, table
from benchmarks.length.task import LIMIT, MOST_NEEDED, score, write_task
from benchmarks.whole_runs.extent import Plan
from bus.errors import SluiceError
from bus.trajectory import FinishReason
from storage.built_in_tasks.generators import load_demonstrations
from storage.prompt_files.dataset import load_prompts
from storage.settings.data import PromptKeys
from tests.factories import make_trajectory

pytestmark = pytest.mark.slow

CELL = Cell(0, "wrong", 8, "token_tis")


def outcome(method="token_tis", lag=8, *, cut_off="wrong", seed=0, least=0.0, settings="s") -> Outcome:
    """An outcome in whose middle third only the share `least` of the answers is completed."""
    completed = (1.0,) * 20 + (least,) * 20 + (0.9,) * 20
    return Outcome(
        method=method, lag=lag, cut_off=cut_off, seed=seed, settings=settings, wall_s=30.0,
        completed=completed, lengths=tuple(10 - 7 * share for share in completed), rewards=(0.5,) * 60,
        staleness=(*map(float, range(lag)), *(float(lag),) * (60 - lag)), ess=(0.8,) * 60,
        evaluated_steps=tuple(range(0, 61, 5)), right=(0.3,) * 10 + (0.5, 0.6, 0.7),
    )  # fmt: skip


# --- the task ---


def answer(text: str, finish_reason: FinishReason = "stop", label: str = "3") -> Answer:
    return Answer(task_id="1", messages=(), text=text, finish_reason=finish_reason, label=label)


def test_only_a_completed_answer_with_enough_dots_is_right():
    assert [score(answer("." * n)) for n in (2, 3, 9)] == [0.0, 1.0, 1.0]
    assert score(answer("." * LIMIT, "length")) == 0.0


def test_the_task_is_that_of_its_seed_and_shows_nothing_of_what_is_needed(tmp_path: Path):
    files, again = (write_task(tmp_path / name, seed=1) for name in "ab")
    other = write_task(tmp_path / "c", seed=2)
    assert files.prompts.read_bytes() == again.prompts.read_bytes() != other.prompts.read_bytes()
    prompts = load_prompts(files.prompts, PromptKeys())
    needed = {prompt.content: set() for prompt in prompts}
    for prompt in prompts:
        needed[prompt.content].add(int(prompt.label))
    assert all(found == set(range(1, MOST_NEEDED + 1)) for found in needed.values())
    assert len(load_prompts(files.heldout, PromptKeys())) == 128
    lengths = [len(response) for _, response in load_demonstrations(files.demonstrations)]
    assert (min(lengths), max(lengths)) == (1, LIMIT - 1)  # with its end, the longest is as long as allowed
    assert lengths.count(1) / len(lengths) == pytest.approx(0.5, abs=0.03)


def test_what_was_cut_off_is_in_no_baseline_and_moves_nothing():
    group = [
        replace(make_trajectory(1, n, reward=reward), end=end)
        for n, (reward, end) in enumerate(
            [(1.0, "completed"), (0.0, "completed"), (0.0, "length"), (0.0, "length")]
        )
    ]
    [advantages] = completed_only([group], std_floor=0.0)
    assert advantages == [1.0, -1.0, 0.0, 0.0]
    [of_all_cut_off] = completed_only([group[2:]], std_floor=0.0)
    assert of_all_cut_off == [0.0, 0.0]


# --- which cells there are, and what they run ---


def test_a_seed_is_complete_before_the_next_one_begins():
    cells = grid(METHODS, LAGS, CUT_OFF, SEEDS)
    of_a_seed = len(METHODS) * len(LAGS) * len(CUT_OFF)
    assert len({cell.name for cell in cells}) == len(cells) == 3 * of_a_seed
    assert [cell.seed for cell in cells] == [0] * of_a_seed + [1] * of_a_seed + [2] * of_a_seed
    assert CELL.name == "token_tis-lag8-wrong-seed0"


def test_every_cell_is_a_configuration_that_a_run_takes_and_differs_from_the_others(tmp_path: Path):
    base = base_settings({}, steps=7)
    learners = set()
    for cell in grid(METHODS, LAGS, CUT_OFF, (1,)):
        config = settings_of(cell, base, tmp_path)
        again = settings_of(cell, json.loads(config.model_dump_json()), tmp_path)
        assert config == again  # it passes through a file
        assert (config.seed, config.learner.steps, config.admission.max_staleness) == (1, 7, cell.lag)
        assert config.admission.exact_staleness
        learners.add(config.learner.model_dump_json())
    assert len(learners) == len(METHODS) * len(CUT_OFF)


def test_the_digest_is_that_of_the_settings_wherever_a_run_lies():
    assert digest(base_settings({}, steps=7)) == digest(base_settings({"directory": "x"}, steps=7))
    assert digest(base_settings({}, steps=7)) != digest(base_settings({}, steps=8))
    other = {"learner": {"optimizer": {"lr": 1e-3}}}
    assert digest(base_settings({}, steps=7)) != digest(base_settings(other, steps=7))


# --- what a run was like ---


def records() -> list[dict]:
    step = {"train/stage": "rl", "reward/mean": 0.25, "policy/ess_fraction": 0.75}
    steps = [
        step
        | {
            "step": n,
            "rollout/completed_fraction": share,
            "train/response_tokens_mean": 10 * (1 - share),
            "staleness/mean_versions": float(n - 1),
        }
        for n, share in ((1, 1.0), (2, 0.5))
    ]
    evaluations = [{"kind": "evaluation", "step": n, "sampled": 0.1 * n} for n in (0, 2)]
    return [*evaluations, *reversed(steps), {"train/stage": "warmup", "step": 9}]


def test_an_outcome_is_read_from_the_record_of_a_run():
    found = outcome_of(CELL, records(), settings="s", wall_s=1.25)
    assert found.cell == CELL
    assert (found.completed, found.lengths, found.staleness) == ((1.0, 0.5), (0.0, 5.0), (0.0, 1.0))
    assert (found.evaluated_steps, found.right) == ((0, 2), (0.0, 0.2))
    assert Outcome.of_json(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(SluiceError, match="has 2 steps and 0 evaluations"):
        outcome_of(CELL, records()[2:], settings="s", wall_s=1.0)


def test_figures_say_how_far_the_length_ran_away_and_where_it_ended():
    found = outcome(least=0.2).figures()
    assert found["runaway_share"] == pytest.approx(1 / 3)
    assert (found["completed_least"], found["completed_end"]) == pytest.approx((0.2, 0.9))
    assert (found["length_most"], found["length_end"]) == pytest.approx((8.6, 3.7))
    assert found["right_end"] == pytest.approx(0.6)
    assert found["staleness_mean"] == 8.0
    assert outcome(least=0.5).figures()["runaway_share"] == 0.0


# --- over seeds ---


def test_the_report_says_whether_token_tis_runs_away_and_what_holds_the_length():
    cells = [outcome(seed=n, least=least) for n, least in ((0, 0.1), (1, 0.1), (2, 0.9))]
    cells += [outcome("ppo_clip", least=0.8), outcome("token_tis", 0, least=0.9)]
    assert report(cells)["shown"] == {
        "wrong at 8": {"token_tis_runs_away": True, "ppo_clip_holds": True, "dppo_tv_holds": None}
    }
    assert report([outcome("dppo_tv", least=0.1)])["shown"]["wrong at 8"]["dppo_tv_holds"] is False
    assert set(HELD) <= set(METHODS)
    assert report([])["shown"] == {}


def test_the_table_has_a_cell_for_each_arm_and_the_picture_is_drawn(tmp_path: Path):
    cells = [outcome(seed=n, least=0.1 * n) for n in range(3)]
    cells += [outcome("ppo_clip", cut_off="left_out", least=0.8), outcome("none", 0, least=0.9)]
    told, _, head, _, *rows = table(cells).splitlines()
    assert told.startswith("Seeds: 1 to 3.")
    assert head == "| method | wrong, lag 0 | wrong, lag 8 | left out, lag 8 |"
    assert rows == [
        "| none | 0.00; 0.60 |  |  |",
        "| token_tis |  | 0.33±0.00; 0.60±0.00 |  |",
        "| ppo_clip |  |  | 0.00; 0.60 |",
    ]
    write_report(cells, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"length.md", "length.png"}


# --- calls that go on ---


async def test_a_later_call_measures_only_what_is_missing_or_of_other_settings(tmp_path, monkeypatch):
    cells = [Cell(0, "wrong", 8, method) for method in ("token_tis", "ppo_clip")]
    plan = Plan(cells, tmp_path / "of", tmp_path / "length.jsonl", {}, parallel=1, cell_s=60.0, limit_s=60.0)
    ran: list[str] = []

    async def run_cell(cell, base, scratch, stop, *, settings, limit_s):
        ran.append(cell.name)
        return outcome(cell.method, settings=settings)

    monkeypatch.setattr(bench_of_length, "run_cell", run_cell)
    none = await measure_cells(replace(plan, limit_s=0.0), asyncio.Event(), steps=5)
    assert (none["cells"], none["left"]) == (0, [cell.name for cell in cells])
    one = await measure_cells(replace(plan, cells=cells[:1]), asyncio.Event(), steps=5)
    assert (one["cells"], one["measured_now"], one["left"]) == (1, 1, [])
    both = await measure_cells(plan, asyncio.Event(), steps=5)
    assert (both["cells"], both["measured_now"]) == (2, 1)
    assert ran == [cell.name for cell in cells]
    others = await measure_cells(plan, asyncio.Event(), steps=6)
    assert (others["cells"], others["measured_now"]) == (2, 2)
    assert others["of_other_settings"] == sorted(ran[:2])
    again = await measure_cells(plan, asyncio.Event(), steps=5)
    assert (again["cells"], again["measured_now"]) == (2, 0)
