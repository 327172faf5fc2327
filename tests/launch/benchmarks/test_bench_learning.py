"""Tests what `launch bench learning` does without a run: cells, settings, figures, table, comparison."""

import asyncio
from dataclasses import replace
from math import gamma, isnan, pi, sqrt
from pathlib import Path

import numpy as np
import pytest

from benchmarks.commands.learning import LearningExtent
from benchmarks.learning import cell_run
from benchmarks.learning.bench import measure_cells, write_report
from benchmarks.learning.cell_run import FAILING, base_settings, digest, settings_of
from benchmarks.learning.cells import FAILURES, PRESETS, SEEDS, STEPS, Cell, chosen_fractions, grid
from benchmarks.learning.outcome import Outcome, area, outcome_of
from benchmarks.learning.report import arms, comparisons, report, table, welch_p
from benchmarks.whole_runs.extent import Extent, Plan, plan_of
from benchmarks.whole_runs.results import Results
from bus.errors import ConfigError, SluiceError
from launch.settings.run_config import RunConfig, resolve

pytestmark = pytest.mark.slow

CELL = Cell(0, "guess", 0.1)


def outcome(preset="guess", failures=0.0, *, seed=0, top=0.95, settings="s", last=50) -> Outcome:
    """An outcome that rises evenly from 0.5 to `top` at step 20, and stays there to step `last`."""
    steps = tuple(range(0, last + 1, 10))
    sampled = (0.5, (0.5 + top) / 2, *(top,) * (len(steps) - 2))
    return Outcome(
        preset=preset, failures=failures, seed=seed, settings=settings, wall_s=60.0,
        steps=steps, sampled=sampled, greedy=sampled, seconds=tuple(20.0 + step for step in steps),
        sampled_trajectories=1000, trained_trajectories=800, episodes=1000,
        failed_episodes=round(1000 * failures),
    )  # fmt: skip


# --- which cells there are, and what they run ---


def test_a_seed_is_complete_before_the_next_one_begins():
    cells = grid(PRESETS, FAILURES, SEEDS)
    of_a_seed = len(PRESETS) * len(FAILURES)
    assert len({cell.name for cell in cells}) == len(cells) == 3 * of_a_seed
    assert [cell.seed for cell in cells] == [seed for seed in SEEDS for _ in range(of_a_seed)]
    assert cells[:2] == [Cell(0, "guess", 0.0), Cell(0, "guess", 0.1)]
    assert cells[1].name == "guess-failures100-seed0"


def test_the_help_names_every_preset_and_fraction():
    said = {name: field.description or "" for name, field in LearningExtent.model_fields.items()}
    assert f"without it {','.join(PRESETS)}." in said["presets"]
    assert f"without it {','.join(f'{share:g}' for share in FAILURES)}." in said["failures"]


def test_fractions_are_ascending_and_what_is_none_is_refused():
    assert chosen_fractions("--failures", "0.1, 0", FAILURES) == (0.0, 0.1)
    assert chosen_fractions("--failures", "", FAILURES) == FAILURES
    for wrong in ("1", "-0.1", "0.1234", "nan", "a tenth"):
        with pytest.raises(ConfigError, match=f"--failures {wrong}: give fractions"):
            chosen_fractions("--failures", wrong, FAILURES)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_arm_with_failures_wraps_the_environment_of_the_preset_and_changes_nothing_else(preset, tmp_path):
    plain, failing = (settings_of(Cell(1, preset, f), {}, tmp_path, steps=7) for f in (0.0, 0.1))
    environment = failing.actors.environment
    assert environment.environment == FAILING
    assert environment.settings["fraction"] == 0.1
    inner = environment.settings["environment"]
    assert type(plain.actors.environment).model_validate(inner) == plain.actors.environment
    same = {"actors": plain.actors.model_copy(update={"environment": environment}), "run": plain.run}
    assert failing.model_copy(update=same) == plain.model_copy(update=same)
    assert (plain.seed, plain.learner.steps, plain.learner.target_accuracy) == (1, 7, None)


def test_a_digest_is_of_the_preset_its_settings_and_the_steps():
    longer = {"warmup": {"steps": 9}}
    found = [digest("guess", {}, steps=5), digest("guess", {}, steps=6), digest("nim", {}, steps=5)]
    assert len({*found, digest("guess", longer, steps=5)}) == 4
    assert digest("guess", {"directory": Path("elsewhere")}, steps=5) == found[0]


def test_types_that_differ_in_nothing_else_have_digests_of_their_own():
    losses = [{"learner": {"loss": {"type": name}}} for name in ("reinforce", "cispo", "clip_cov")]
    found = [digest("guess", given, steps=5) for given in losses]
    assert len({*found}) == 3
    assert found[0] == digest("guess", {}, steps=5)


def test_a_further_setting_of_a_later_build_leaves_cells_comparable(monkeypatch):
    class Later(RunConfig):
        further: int = 3

    before = digest("guess", {}, steps=5)
    now = resolve(base_settings("guess", {}, steps=5)).model_dump()
    for further, same in ((3, True), (4, False)):
        monkeypatch.setattr(
            cell_run, "resolve", lambda *_, further=further: Later.model_validate(now | {"further": further})
        )
        assert (digest("guess", {}, steps=5) == before) == same


# --- what a run has shown ---

RECORDS = [
    {"kind": "metrics", "time_s": 90.0, "train/stage": "warmup", "step": 2, "train/trajectories": 99},
    {"kind": "evaluation", "time_s": 100.0, "policy_version": 0, "sampled": 0.0, "greedy": 0.0},
    {"kind": "evaluation", "time_s": 130.0, "policy_version": 2, "sampled": 0.9, "greedy": 1.0},
    {"kind": "evaluation", "time_s": 110.0, "policy_version": 1, "sampled": 0.5, "greedy": 0.6},
    {"time_s": 125.0, "train/stage": "rl", "step": 1, "train/policy_version": 2, "train/trajectories": 30},
    {"time_s": 95.0, "source": "a", "engine/busy_s": 1.0, "rollout/episodes": 5},
    {"time_s": 140.0, "source": "a", "engine/busy_s": 2.0, "sampled/trajectories": 30,
     "rollout/episodes": 40, "rollout/infra_failed_episodes": 4},
    {"time_s": 140.0, "source": "b", "engine/busy_s": 2.0, "sampled/trajectories": 10,
     "rollout/episodes": 10, "rollout/infra_failed_episodes": 1},
]  # fmt: skip


def test_steps_count_from_the_version_that_reinforcement_learning_begins_with():
    found = outcome_of(CELL, RECORDS, settings="s", wall_s=55.04)
    assert (found.steps, found.sampled, found.greedy) == ((0, 1), (0.5, 0.9), (0.6, 1.0))
    assert found.seconds == (20.0, 40.0)
    assert (found.sampled_trajectories, found.trained_trajectories) == (40, 30)
    assert (found.episodes, found.failed_episodes) == (50, 5)
    assert Outcome.of_json(found.to_json()) == found
    assert found.figures()["trained_share"] == 0.75
    assert found.figures()["failed_share"] == 0.1


def test_a_run_without_steps_or_without_its_first_evaluation_is_no_outcome():
    with pytest.raises(SluiceError, match="0 steps and counters of 2 actors"):
        outcome_of(CELL, [row for row in RECORDS if row.get("train/stage") != "rl"], settings="s", wall_s=1.0)
    with pytest.raises(SluiceError, match="no evaluation of step 0"):
        outcome_of(CELL, [row for row in RECORDS if row.get("policy_version") != 1], settings="s", wall_s=1.0)


def test_figures_are_start_end_area_and_when_the_target_was_reached():
    found = outcome().figures()
    assert (found["start"], found["end"]) == (0.5, pytest.approx(0.95))
    assert found["area"] == pytest.approx((20 * 0.725 + 30 * 0.95) / 50)
    # smoothed: (0.5 + 0.725 + 0.95) / 3 = 0.725 at 10, 0.875 at 20, 0.95 at 30
    assert found["steps_to_target"] == pytest.approx(20 + 10 / 3)
    assert found["seconds_to_target"] == pytest.approx(40 + 10 / 3)
    never = outcome(top=0.8).figures()
    assert isnan(never["steps_to_target"])
    assert isnan(never["seconds_to_target"])


def test_an_area_is_a_mean_height_however_the_steps_lie():
    assert area([0, 10, 40], [0.0, 1.0, 1.0]) == pytest.approx(35 / 40)
    assert area([0], [0.3]) == 0.3


# --- what the cells say together ---


def test_arms_are_compared_by_welchs_test():
    t, freedom = 1 / sqrt(1 / 3 + 4 / 3), (5 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)
    scale = gamma((freedom + 1) / 2) / (sqrt(freedom * pi) * gamma(freedom / 2))
    x = np.linspace(-t, t, 100_001)  # Student's density, integrated where the null hypothesis is kept
    inside = np.trapezoid(scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x)
    assert welch_p([1.0, 2.0, 3.0], [1.0, 3.0, 5.0]) == pytest.approx(1 - inside, abs=1e-9)
    assert isnan(welch_p([1.0], [1.0, 2.0]))
    assert (welch_p([1.0, 1.0], [1.0, 1.0]), welch_p([1.0, 1.0], [2.0, 2.0])) == (1.0, 0.0)


def test_a_bias_is_told_from_noise_and_an_arm_alone_is_compared_with_nothing():
    same = [outcome(failures=f, seed=n, top=0.9 + 0.01 * n) for f in FAILURES for n in SEEDS]
    worse = [outcome("nim", f, seed=n, top=0.9 - 3 * f + 0.01 * n) for f in FAILURES for n in SEEDS]
    found = comparisons(arms([*same, *worse, outcome("panel", 0.1)]))
    assert found == {("guess", 0.1): pytest.approx(1.0), ("nim", 0.1): found["nim", 0.1]}
    assert found["nim", 0.1] < 0.001
    verdicts = {(row["preset"], row["failures"]): row["no_bias"] for row in report(same + worse)["figures"]}
    assert verdicts == {("guess", 0.0): None, ("guess", 0.1): True, ("nim", 0.0): None, ("nim", 0.1): False}


def test_the_table_has_a_row_for_each_arm_and_the_picture_is_drawn(tmp_path: Path):
    outcomes = [outcome(failures=f, seed=n) for n in (0, 1) for f in FAILURES] + [
        outcome("nim", top=0.8, last=40)
    ]
    rows = table(outcomes).splitlines()
    assert rows[0].startswith("| preset | injected | seeds | steps | start | end | area | steps to target |")
    assert rows[2].startswith("| guess | 0% | 2 | 50±0 | 0.50±0.00 | 0.95±0.00 |")
    assert rows[3].endswith("±0 | 1.00 |")
    assert rows[4].startswith("| nim | 0% | 1 | 40 | 0.50 | 0.80 |")
    assert " - | - |" in rows[4]  # no target
    assert len(rows) == 5
    write_report(outcomes, tmp_path)
    assert (tmp_path / "learning.md").read_text() == table(outcomes)
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")


# --- calls that go on ---


async def test_a_later_call_measures_only_what_is_missing_or_of_other_settings(tmp_path, monkeypatch):
    cells = grid(["guess"], FAILURES, [0, 1])
    settings = digest("guess", {}, steps=5)
    Results(tmp_path / "cells.jsonl", Outcome.of_json).add(outcome(settings=settings))
    measured = []

    async def run_cell(cell, config, stop, *, settings, limit_s):
        measured.append((cell, config.run))
        if cell.seed:
            raise SluiceError("it broke")
        return outcome(failures=cell.failures, settings=settings)

    monkeypatch.setattr("benchmarks.learning.bench.run_cell", run_cell)
    plan = Plan(cells, tmp_path, tmp_path / "cells.jsonl", {}, parallel=1, cell_s=9.0)
    none = await measure_cells(replace(plan, limit_s=0.0), asyncio.Event(), steps=5)
    assert (none["measured_now"], none["cells"], len(none["left"])) == (0, 1, 3)
    found = await measure_cells(plan, asyncio.Event(), steps=5)
    assert measured == [(cell, cell.name) for cell in cells[1:]]
    assert (found["measured_now"], found["cells"]) == (1, 2)
    assert set(found["failed"]) == {cell.name for cell in cells[2:]}
    others = await measure_cells(replace(plan, limit_s=0.0), asyncio.Event(), steps=6)
    assert (others["cells"], others["of_other_settings"]) == (0, [cell.name for cell in cells[:2]])


async def test_each_preset_takes_its_own_steps_unless_a_call_names_them(tmp_path, monkeypatch):
    cells, configs = grid(PRESETS, [0.0], [0]), {}

    async def run_cell(cell, config, stop, *, settings, limit_s):
        configs[cell.preset] = config.learner.steps, settings
        raise SluiceError("only its settings count")

    monkeypatch.setattr("benchmarks.learning.bench.run_cell", run_cell)
    plan = Plan(cells, tmp_path, tmp_path / "cells.jsonl", {}, parallel=1, cell_s=9.0)
    await measure_cells(plan, asyncio.Event())
    assert configs == {name: (steps, digest(name, {}, steps=steps)) for name, steps in STEPS.items()}
    await measure_cells(plan, asyncio.Event(), steps=7)
    assert {steps for steps, _ in configs.values()} == {7}


def test_outcomes_lie_in_the_docs_of_a_checkout_unless_another_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = plan_of("learning", [CELL], Extent(), {})
    assert elsewhere.outcomes == elsewhere.directory / "cells.jsonl" == Path("runs/learning/cells.jsonl")
    Path("docs/measurements").mkdir(parents=True)
    committed = plan_of("learning", [CELL], Extent(), {})
    assert committed.outcomes == Path("docs/measurements/learning.jsonl")
    assert committed.directory == Path("runs/learning")
    named = plan_of("learning", [CELL], Extent(), {"directory": tmp_path / "own"})
    assert named.outcomes == tmp_path / "own" / "cells.jsonl"
