"""The summary's numbers and table, and the picture of the curves."""

import json
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bus.codec import Json
from launch.run_view.history import History
from launch.run_view.monitor import RunMonitor, RunSettings
from launch.screens import curves
from launch.screens.curves import HEIGHT_PX, WIDTH_PX, _draw_evaluations, _draw_reward, draw_curves
from launch.screens.summary import _accounted, print_summary, summarise, write_summary
from launch.screens.terminal_view import status_line
from launch.settings.run_config import resolve
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import Record, append_records, evaluation_record, metrics_record, read_records
from tests.launch.dashboard.run_on_disk import make_supervised_run
from tests.launch.messages import FACTS, MIB, actor, evaluation, learner, metrics, storage

PROGRESS: dict[str, Json] = {
    "stage": "done",
    "warmup_step": 100,
    "step": 20,
    "policy_version": 21,
    "trains_from": 1,
    "trajectories_trained": 5120,
    "max_staleness_seen": 4,
    "warmup_s": 12.5,
    "rl_s": 95.0,
    "target_reached_s": 90.0,
    "target_reached_step": 18,
    "evaluations": {"0": [0.02, 0.03], "1": [0.3, 0.35], "21": [0.91, 0.95]},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path, "demo")


def watched() -> RunMonitor:
    monitor = RunMonitor(FACTS)
    for status in (learner(stage="done"), storage(), actor(0), actor(1)):
        monitor.on_status(status)
    return monitor


def test_alarms_that_held_at_the_end_are_in_the_summary(run: RunDirectory):
    monitor = watched()
    monitor.on_status(actor(1, alarm="engine-0 samples as version 3 did"))
    summary = summarise(monitor, run=run, progress=PROGRESS, checkpoint=None, wall_s=130.0)
    assert summary["alarms"] == {"actor-host-1001": "engine-0 samples as version 3 did"}
    console = Console(file=StringIO(), width=100)
    print_summary(console, summary)
    assert "ALARM of actor-host-1001" in console.file.getvalue()
    assert "engine-0 samples as version 3 did" in console.file.getvalue()


def test_summary_of_a_finished_run(run: RunDirectory):
    run.metrics.touch()
    (run.export / "config.json").touch()
    summary = summarise(watched(), run=run, progress=PROGRESS, checkpoint=Path("c/step_20"), wall_s=130.0)
    expected = {
        "stage": "done",
        "heldout_accuracy_start": 0.02,
        "heldout_accuracy_after_sft": 0.3,
        "heldout_accuracy_end": 0.91,
        "heldout_accuracy_greedy_end": 0.95,
        "wall_s": 130.0,
        "warmup_wall_s": 12.5,
        "rl_wall_s": 95.0,
        "steps": 20,
        "target_reached_s": 90.0,
        "target_reached_step": 18,
        "trajectories_published": 5216,
        "trajectories_trained": 5120,
        "trajectories_rejected": {"zero_variance": 672, "rollout_failed": 48},
        "trajectories_in_store": 96,
        "trajectories_rolling_out": 512,
        "groups_rejected": {"zero_variance": 84, "rollout_failed": 6},
        "accounted": True,
        "max_staleness_allowed": 4,
        "max_staleness_seen": 4,
        "peak_rss_bytes_total": 1800 * MIB,
        "checkpoint": "c/step_20",
        "export": str(run.export),
        "metrics": str(run.metrics),
        "curves": None,
    }
    assert {key: summary[key] for key in expected} == expected


def test_what_was_not_measured_is_null(run: RunDirectory):
    summary = summarise(RunMonitor(FACTS), run=run, progress=None, checkpoint=None, wall_s=1.0)
    for key in (
        "heldout_accuracy_start", "heldout_accuracy_after_sft", "heldout_accuracy_end", "rl_wall_s",
        "warmup_wall_s", "target_reached_s", "target_reached_step", "trajectories_in_store",
        "trajectories_rolling_out", "accounted", "export", "checkpoint", "metrics", "curves",
    ):  # fmt: skip
        assert summary[key] is None, key
    assert (summary["stage"], summary["steps"], summary["trajectories_rejected"]) == ("starting", 0, {})


def test_without_warm_up_there_is_no_accuracy_after_it(run: RunDirectory):
    progress = PROGRESS | {"trains_from": 0, "policy_version": 20}
    summary = summarise(watched(), run=run, progress=progress, checkpoint=None, wall_s=1.0)
    assert summary["heldout_accuracy_start"] == 0.02
    assert summary["heldout_accuracy_after_sft"] is None
    assert summary["heldout_accuracy_end"] is None  # version 20 was not evaluated


def test_an_evaluation_that_came_after_the_checkpoint_counts(run: RunDirectory):
    monitor = watched()
    monitor.on_event(evaluation(21, 0.88), time.time())
    progress = PROGRESS | {"evaluations": {"0": [0.02, 0.03]}}
    summary = summarise(monitor, run=run, progress=progress, checkpoint=None, wall_s=1.0)
    assert summary["heldout_accuracy_end"] == 0.88


@pytest.mark.parametrize("values", [{"issued": 807}, {"trained": 600}, {"issued": 205, "trained": 39}])
def test_a_group_lost_or_trained_without_leave_is_not_accounted_for(run: RunDirectory, values):
    monitor = watched()
    monitor.on_status(storage(**values))
    summary = summarise(monitor, run=run, progress=PROGRESS, checkpoint=None, wall_s=1.0)
    assert summary["accounted"] is False


def test_trained_trajectories_are_judged_by_how_many_a_rollout_has():
    single, panel, tools = (
        RunSettings.of_run(resolve({"actors": {"environment": environment}}))
        for environment in ({}, {"type": "panel", "solvers": 2, "rewriters": 1}, {"type": "game"})
    )
    assert [s.trajectories_per_rollout for s in (single, panel, tools)] == [1, 4, None]
    ledger = {"issued": 3, "trained": 2, "stored": 1}  # 2 groups of 8 rollouts
    judged = {16: [True, True, True], 17: [False, True, True], 65: [False, False, True]}
    for trained, expected in judged.items():
        assert [_accounted(ledger, s, trained=trained) for s in (single, panel, tools)] == expected


def test_the_file_holds_the_summary(run: RunDirectory):
    summary = summarise(watched(), run=run, progress=PROGRESS, checkpoint=None, wall_s=1.0)
    write_summary(run, summary)
    assert json.loads(run.summary.read_text()) == summary


def printed(summary: dict[str, Json]) -> str:
    console = Console(file=StringIO(), width=100, record=True)
    print_summary(console, summary)
    return console.export_text()


def test_the_table_has_units_and_reasons(run: RunDirectory):
    summary = summarise(watched(), run=run, progress=PROGRESS, checkpoint=None, wall_s=130.0)
    text = printed(json.loads(json.dumps(summary)))
    for part in (
        "0.910", "0.900, reached at step 18, 1 min 30 s into reinforcement learning", "2 min 10 s",
        "672 zero_variance, 48 rollout_failed", "4 policy versions, 4 allowed", "at most 1.76 GiB together",
    ):  # fmt: skip
        assert part in text


def test_the_table_says_which_versions_answered_for_another(run: RunDirectory):
    monitor = watched()
    for version, sampled, drawn_by in ((0, 0.02, (0, 1)), (1, 0.3, (2, 2)), (21, 0.91, (21, 21))):
        monitor.on_event(evaluation(version, sampled, drawn_by=drawn_by), time.time())
    summary = summarise(monitor, run=run, progress=PROGRESS, checkpoint=None, wall_s=130.0)
    found = {version: row.get("drawn_by") for version, row in summary["heldout_evaluations"].items()}
    assert found == {"0": [0, 1], "1": [2, 2], "21": None}
    text = printed(json.loads(json.dumps(summary)))
    for part in ("0.020 (drawn by v0 to v1)", "0.300 (drawn by v2)", "0.910 "):
        assert part in text
    assert "0.910 (" not in text


def test_the_table_says_how_many_rollouts_of_an_evaluation_failed(run: RunDirectory):
    monitor = watched()
    monitor.on_event(evaluation(1, 0.3, drawn_by=(2, 2), failed=3), time.time())
    monitor.on_event(evaluation(21, 0.91, failed=1), time.time())
    summary = summarise(monitor, run=run, progress=PROGRESS, checkpoint=None, wall_s=130.0)
    found = {version: row.get("failed") for version, row in summary["heldout_evaluations"].items()}
    assert found == {"0": None, "1": 3, "21": 1}
    text = printed(json.loads(json.dumps(summary)))
    for part in ("0.300 (drawn by v2, 3 rollouts failed)", "0.910 (1 rollout failed)"):
        assert part in text


def test_the_table_names_no_versions_where_nothing_was_measured(run: RunDirectory):
    monitor = watched()
    monitor.on_event(evaluation(0, 0.02, drawn_by=(0, 3)), time.time())
    progress = PROGRESS | {"trains_from": 0, "policy_version": 20, "evaluations": {}}
    lines = printed(summarise(monitor, run=run, progress=progress, checkpoint=None, wall_s=1.0)).splitlines()
    [untrained] = [line for line in lines if "untrained" in line or "after warm-up" in line]
    assert "0.020 (drawn by v0 to v3)" in untrained


def test_the_table_of_a_run_without_numbers(run: RunDirectory):
    text = printed(summarise(RunMonitor(FACTS), run=run, progress=None, checkpoint=None, wall_s=1.0))
    assert "0.900, not reached" in text
    assert "not known" in text
    assert "Held-out" not in text
    assert "`launch convert`" in text


# --- curves ---


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def a_run(steps: int) -> list[Record]:
    records = [metrics_record(metrics(step, reward=step / steps)) for step in range(1, steps + 1)]
    results = (evaluation(version, version / steps) for version in range(0, steps, 10))
    return records + [evaluation_record(result, step=result.policy_version, time_s=0.0) for result in results]


def test_data_sets_and_the_best_checkpoint_are_in_the_summary_and_its_table(run: RunDirectory):
    monitor = watched()
    scores = {"pass@1": 0.25, "pass@4": 0.5, "pass^4": 0.125}
    for version in (11, 21):
        monitor.on_event(evaluation(version, 0.25, data_set="aime", scores=scores), time_s=1.0)
    best = {"metric": "aime/pass@4", "value": 0.5, "policy_version": 11, "step": 10}
    (run.checkpoints / "step_00000010" / "manifest").mkdir(parents=True)
    progress = PROGRESS | {"best": best}
    summary = summarise(monitor, run=run, progress=progress, checkpoint=None, wall_s=1.0)
    path = run.checkpoints / "step_00000010"
    assert summary["best_checkpoint"] == best | {"path": str(path)}
    assert summary["evaluation_sets"] == {
        "aime": {str(version): {"sampled": 0.25, "greedy": 0.25, **scores} for version in (11, 21)}
    }
    assert summary["heldout_accuracy_end"] == 0.91  # other data sets leave it alone
    file = StringIO()
    print_summary(Console(file=file, width=200), summary)
    text = file.getvalue()
    assert "0.500 aime/pass@4 at v11, checkpoint of step 10" in text
    assert "0.250 sampled, 0.250 greedy, 0.250 pass@1, 0.500 pass@4, 0.125 pass^4 at v21" in text
    print_summary(Console(file=file, width=200), {"run": "old", "stage": "done"})  # an older build's
    assert "not known" in file.getvalue().removeprefix(text)
    assert (
        summarise(monitor, run=run, progress=PROGRESS, checkpoint=None, wall_s=1.0)["best_checkpoint"] is None
    )


def test_a_run_on_pairs_alone_is_summarised_by_its_steps_and_losses(tmp_path: Path):
    run = make_supervised_run(tmp_path, "dpo")
    monitor = RunMonitor(replace(FACTS, steps=0))
    monitor.on_status(learner(stage="done"))
    summary = summarise(monitor, run=run, progress={**PROGRESS, "step": 0}, checkpoint=None, wall_s=1.0)
    rows = [row for row in read_records(run.metrics) if row.get("train/stage") == "warmup"]
    held_out = [row["heldout/loss_nats"] for row in rows if "heldout/loss_nats" in row]
    assert summary["supervised"]["steps"] == len(rows) == 20
    assert summary["supervised"]["train/loss"] == rows[-1]["train/loss"]
    assert summary["supervised"]["heldout/loss_nats"] == held_out[-1]
    console = Console(file=StringIO(), width=100)
    print_summary(console, summary)
    shown = console.file.getvalue()
    assert "Supervised steps" in shown
    assert f"{held_out[-1]:.4g}" in shown
    assert "reinforcement learning" not in shown
    assert "step" not in status_line(monitor).split("|")[0]


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("steps", [0, 1, 500])
def test_curves_are_one_picture_of_known_size(tmp_path: Path, steps: int):
    lines, picture = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    append_records(lines, a_run(steps) if steps else [])
    draw_curves(lines, picture, title="demo", max_staleness=4, target_accuracy=0.9)
    assert png_size(picture) == (WIDTH_PX, HEIGHT_PX)


def test_the_level_before_warm_up_names_the_versions_that_answered():
    from matplotlib.figure import Figure  # takes a quarter of a second to import

    first = evaluation_record(evaluation(0, 0.02, drawn_by=(0, 1), failed=2), step=0, time_s=0.0)
    history = History([*map(metrics_record, map(metrics, (1, 2))), first])
    axes = Figure().subplots()
    _draw_evaluations(axes, history)
    [level] = axes.get_legend_handles_labels()[1]
    assert level == "held-out before warm-up: 0.020 at v0 (drawn by v0 to v1, 2 rollouts failed)"


def test_the_reward_of_each_source_is_a_curve():
    from matplotlib.figure import Figure

    rows = [metrics(n, **{"source_reward/gsm8k": n / 4, "source_reward/aime": 0.1}) for n in (1, 2)]
    axes = Figure().subplots()
    _draw_reward(axes, History(map(metrics_record, rows)), None)
    drawn = {line.get_label(): line.get_ydata()[-1] for line in axes.get_lines()}
    assert drawn["gsm8k, training, last 10 steps"] == pytest.approx(0.375)
    assert drawn["aime, training, last 10 steps"] == pytest.approx(0.1)


def test_curves_need_neither_numbers_nor_bounds(tmp_path: Path):
    lines, picture = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    append_records(lines, [{"kind": "metrics", "step": 1, "train/stage": "rl"}])
    draw_curves(lines, picture)
    assert png_size(picture) == (WIDTH_PX, HEIGHT_PX)


def test_a_run_on_pairs_alone_has_curves_of_its_losses_and_preferences(tmp_path: Path, monkeypatch):
    run = make_supervised_run(tmp_path, "dpo")
    again = metrics_record(metrics(20, stage="warmup", **{"train/loss": 0.25}))
    append_records(run.metrics, [again])  # a resumed run takes a step once more
    drawn = {}
    monkeypatch.setattr(curves, "_finish", lambda axes, title, _: drawn.update({title: [*axes.get_lines()]}))
    draw_curves(run.metrics, run.curves)
    assert png_size(run.curves) == (WIDTH_PX, HEIGHT_PX)
    losses, preferences, tokens = drawn.values()
    assert [line.get_label() for line in losses] == ["of the step", "held out"]
    assert (len(losses[0].get_ydata()), losses[0].get_ydata()[-1]) == (20, 0.25)
    assert list(losses[1].get_xdata()) == [10]  # and not of the step that was taken again
    assert len(preferences) == 3
    assert tokens[0].get_ydata()[0] == 201
