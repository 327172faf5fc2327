"""The result of a run: numbers for a file, and a table for the terminal."""

from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bus.codec import Json
from launch.run_view.history import Evaluation, remarks, supervised_steps
from launch.run_view.monitor import RunMonitor, RunSettings
from launch.run_view.status_texts import best_text
from launch.run_view.units import UNKNOWN, count, duration, fraction, size
from storage.disk import checkpoints
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import integer, number

Summary = dict[str, Json]
NO_EXPORT = "written when the run is done; `launch convert` makes one of a checkpoint"
SUPERVISED = {
    "train/loss": "Loss of the last step",
    "heldout/loss_nats": "Held-out loss",
    "rewards/accuracies": "Preference accuracy of the last step",
    "heldout/rewards/accuracies": "Held-out preference accuracy",
}
"""What is said of steps on demonstrations or pairs alone."""


def summarise(
    monitor: RunMonitor, *, run: RunDirectory, progress: Mapping[str, Json] | None,
    checkpoint: Path | None, wall_s: float,
) -> Summary:  # fmt: skip
    """Return everything a run is judged by. None (null) stands for what was not measured."""
    progress = progress or {}
    return {
        "run": run.name,
        "stage": progress.get("stage", monitor.stage),
        **_accuracies(monitor, progress),
        "evaluation_sets": _sets(monitor),
        "best_checkpoint": _best(run, progress),
        "wall_s": wall_s,
        "warmup_wall_s": progress.get("warmup_s"),
        "rl_wall_s": progress.get("rl_s"),
        "supervised": _supervised(run) if monitor.settings.steps == 0 else None,
        "steps": _latest(monitor, progress, "step"),
        "policy_version": _latest(monitor, progress, "policy_version"),
        "target_accuracy": monitor.settings.target_accuracy,
        "target_reached_s": progress.get("target_reached_s"),
        "target_reached_step": progress.get("target_reached_step"),
        **_groups(monitor, _latest(monitor, progress, "trajectories_trained")),
        "max_staleness_allowed": monitor.max_staleness_allowed,
        "max_staleness_seen": max(
            integer(progress, "max_staleness_seen"), integer(monitor.values("learner"), "max_staleness_seen")
        ),
        "alarms": monitor.alarms,
        "peak_rss_bytes": dict(sorted(monitor.peak_rss_bytes.items())),
        "peak_rss_bytes_total": monitor.peak_rss_bytes_total,
        "export": _existing(run.export),
        "checkpoint": str(checkpoint) if checkpoint else None,
        "metrics": _existing(run.metrics),
        "curves": _existing(run.curves),
    }


def _supervised(run: RunDirectory) -> Summary:
    """Return how far a run on demonstrations alone is, with its latest losses and preferences."""
    rows = supervised_steps(run.metrics)
    latest = {name: value for row in rows.values() for name, value in row.items() if name in SUPERVISED}
    return {"steps": max(rows, default=0), **latest}


def write_summary(run: RunDirectory, summary: Summary) -> None:
    """Replace the run's summary.json at once."""
    write_json(run.summary, summary)


def _latest(monitor: RunMonitor, progress: Mapping[str, Json], key: str) -> int:
    """Return a value from the checkpoint, since later steps are lost, or from the learner's last status."""
    return integer(progress if key in progress else monitor.values("learner"), key)


# --- accuracy ---


def _accuracies(monitor: RunMonitor, progress: Mapping[str, Json]) -> Summary:
    """Return the held-out reward of the first version, of the one after warm-up, and of the last."""
    measured = _evaluations(monitor, progress)
    trains_from = integer(progress, "trains_from") if "trains_from" in progress else monitor.trains_from
    last = _latest(monitor, progress, "policy_version")
    heard = monitor.history.evaluations
    return {
        "heldout_accuracy_start": _sampled(measured, 0),
        "heldout_accuracy_after_sft": _sampled(measured, trains_from) if trains_from else None,
        "heldout_accuracy_end": _sampled(measured, last),
        "heldout_accuracy_greedy_end": measured[last][1] if last in measured else None,
        "heldout_evaluations": {
            str(version): {"sampled": pair[0], "greedy": pair[1], **_how(heard.get(version))}
            for version, pair in measured.items()
        },
    }


def _sets(monitor: RunMonitor) -> Summary:
    """Return what was measured on each further data set, by name and version."""
    return {
        name: {
            str(version): {"sampled": e.sampled, "greedy": e.greedy, **e.scores, **_how(e)}
            for version, e in evaluations.items()
        }
        for name, evaluations in monitor.history.sets.items()
    }


def _best(run: RunDirectory, progress: Mapping[str, Json]) -> Summary | None:
    """Return the best checkpoint with its score and place, as far as the newest checkpoint knows it."""
    best = progress.get("best")
    if not isinstance(best, dict):
        return None
    return {**best, "path": _existing(checkpoints.directory(run.checkpoints, integer(best, "step")))}


def _how(evaluation: Evaluation | None) -> Summary:
    """Return how a version was measured: whether other versions sampled answers, and failed rollouts."""
    if evaluation is None:
        return {}
    drawn_by: Summary = {} if evaluation.exact else {"drawn_by": list(evaluation.drawn_by)}
    return drawn_by | ({"failed": evaluation.failed} if evaluation.failed else {})


def _evaluations(monitor: RunMonitor, progress: Mapping[str, Json]) -> dict[int, tuple[float, float]]:
    """Return (sampled, greedy) by version, from this launch and from the checkpoint of earlier ones."""
    found = {e.policy_version: (e.sampled, e.greedy) for e in monitor.history.evaluations.values()}
    saved = progress.get("evaluations")
    for version, pair in saved.items() if isinstance(saved, dict) else ():
        if isinstance(pair, list | tuple):
            sampled, greedy = (number({"": value}, "") for value in pair)
            found[int(version)] = (sampled, greedy)
    return {version: pair for version, pair in sorted(found.items()) if all(map(isfinite, pair))}


def _sampled(measured: Mapping[int, tuple[float, float]], version: int) -> float | None:
    return measured[version][0] if version in measured else None


# --- where everything went ---


def _groups(monitor: RunMonitor, trained: int) -> Summary:
    """Return trajectories by outcome; the ledger counts groups of `samples_per_prompt` trajectories."""
    storage, samples = monitor.values("storage"), monitor.settings.samples_per_prompt
    rejected = _counts(storage, "reasons")
    groups: dict[str, Json] = {
        state: integer(storage, state) if storage else None
        for state in ("issued", "trained", "stored", "rolling_out", "rejected")
    }
    return {
        "trajectories_published": monitor.trajectories_published,
        "trajectories_trained": trained,
        "trajectories_rejected": {reason: n * samples for reason, n in rejected.items()},
        "trajectories_in_store": integer(storage, "stored") * samples if storage else None,
        "trajectories_rolling_out": integer(storage, "rolling_out") * samples if storage else None,
        "groups": groups,
        "groups_rejected": dict(rejected),
        "messages_set_aside": integer(storage, "dead") if storage else None,
        "messages_set_aside_reasons": dict(_counts(storage, "dead_reasons")),
        "accounted": _accounted(storage, monitor.settings, trained=trained) if storage else None,
    }


def _accounted(storage: Mapping[str, Json], settings: RunSettings, *, trained: int) -> bool:
    """Return whether every issued group is in one known place, and steps trained only on their groups. The
    latter shows where it is known how many trajectories a rollout has."""
    places = ("trained", "rejected", "stored", "rolling_out")
    balanced = integer(storage, "issued") == sum(integer(storage, place) for place in places)
    each = settings.trajectories_per_rollout
    return balanced and (
        each is None or trained <= integer(storage, "trained") * settings.samples_per_prompt * each
    )


def _existing(path: Path) -> str | None:
    there = any(path.iterdir()) if path.is_dir() else path.exists()
    return str(path) if there else None


# --- the table ---


def print_summary(console: Console, summary: Summary) -> None:
    """Show what matters of a summary, with units. One of an older build may lack any of its values."""
    table = Table(
        title=f"Run {summary['run']}, stage {summary['stage']}", show_header=False, title_justify="left"
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    rolls_out = summary.get("supervised") is None
    for section in (_result_rows, *([_rollout_rows] if rolls_out else []), _file_rows):
        for label, text in section(summary):
            table.add_row(Text(label), Text(text))
        table.add_section()
    console.print(table, highlight=False)


def _result_rows(summary: Summary) -> list[tuple[str, str]]:
    if isinstance(found := summary.get("supervised"), dict):
        figures = [(label, _known(found, name)) for name, label in SUPERVISED.items()]
        return [
            ("Supervised steps", str(integer(found, "steps"))),
            *((label, f"{value:.4g}") for label, value in figures if value is not None),
            *((f"ALARM of {name}", str(alarm)) for name, alarm in _alarms(summary).items()),
            ("Time", f"{duration(_known(summary, 'wall_s'))} this launch"),
        ]
    wall, warmup, rl = (duration(_known(summary, key)) for key in ("wall_s", "warmup_wall_s", "rl_wall_s"))
    steps, version = integer(summary, "steps"), integer(summary, "policy_version")
    held_out = [
        ("Held-out reward, untrained", _accuracy(summary, "heldout_accuracy_start", 0)),
        ("Held-out after warm-up", _accuracy(summary, "heldout_accuracy_after_sft", version - steps)),
        ("Held-out at the end", _accuracy(summary, "heldout_accuracy_end", version)),
        ("Target", _target(summary)),
    ]
    return [
        *(row for row in held_out if row[1] != UNKNOWN),
        *((f"{name}, latest", text) for name, text in _latest_of_sets(summary)),
        *([("Best checkpoint", best)] if (best := best_text(summary.get("best_checkpoint"))) else []),
        *((f"ALARM of {name}", str(alarm)) for name, alarm in _alarms(summary).items()),
        ("Optimizer steps", f"{steps} of reinforcement learning, policy version {version}"),
        ("Time", f"{wall} this launch; in all launches warm-up {warmup}, reinforcement learning {rl}"),
    ]


def _accuracy(summary: Summary, key: str, version: int) -> str:
    """Return a version's held-out reward with remarks on how it was measured."""
    measured, evaluations = _known(summary, key), summary.get("heldout_evaluations")
    row = evaluations.get(str(version)) if isinstance(evaluations, dict) else None
    if measured is None or not isinstance(row, dict):
        return fraction(measured)
    failed = integer(row, "failed")
    match row.get("drawn_by"):
        case [int(oldest), int(newest)]:
            return fraction(measured) + remarks((oldest, newest), failed)
    return fraction(measured) + remarks(None, failed)


def _latest_of_sets(summary: Summary) -> Iterator[tuple[str, str]]:
    sets = summary.get("evaluation_sets")
    for name, versions in sets.items() if isinstance(sets, dict) else ():
        if isinstance(versions, dict) and versions:
            version = max(versions, key=int)
            scores = versions[version]
            numbers = scores.items() if isinstance(scores, dict) else ()
            shown = [f"{fraction(v)} {name}" for name, v in numbers if isinstance(v, float)]
            yield name, f"{', '.join(shown)} at v{version}"


def _alarms(summary: Summary) -> dict[str, Json]:
    """Return the alarms that held at the end, by the names of the processes."""
    alarms = summary.get("alarms")
    return alarms if isinstance(alarms, dict) else {}


def _target(summary: Summary) -> str:
    target, step = _known(summary, "target_accuracy"), summary.get("target_reached_step")
    if target is None:
        return UNKNOWN
    if step is None:
        return f"{fraction(target)}, not reached"
    when = duration(_known(summary, "target_reached_s"))
    return f"{fraction(target)}, reached at step {step}, {when} into reinforcement learning"


def _rollout_rows(summary: Summary) -> list[tuple[str, str]]:
    rejected = [f"{count(n)} {reason}" for reason, n in _counts(summary, "trajectories_rejected").items()]
    aside = [f"{count(n)} {kind}" for kind, n in _counts(summary, "messages_set_aside_reasons").items()]
    accounted = (
        "not known" if summary.get("accounted") is None else "yes" if summary.get("accounted") else "NO"
    )
    seen, allowed = summary.get("max_staleness_seen"), summary.get("max_staleness_allowed")
    return [
        ("Trajectories published", count(_known(summary, "trajectories_published"))),
        ("... trained on", count(_known(summary, "trajectories_trained"))),
        ("... rejected, by reason", ", ".join(rejected) or "none"),
        ("... complete, in store", count(_known(summary, "trajectories_in_store"))),
        ("... still rolling out", count(_known(summary, "trajectories_rolling_out"))),
        *([("Messages set aside", ", ".join(aside))] if aside else []),
        ("All accounted for", accounted),
        ("Worst staleness", f"{seen} policy versions, {allowed} allowed"),
        ("Peak memory", _memory(summary)),
    ]


def _memory(summary: Summary, most: int = 6) -> str:
    peaks = sorted(_counts(summary, "peak_rss_bytes").items(), key=lambda item: -item[1])
    shares = [f"{process} {size(peak)}" for process, peak in peaks[:most]]
    more = [f"{len(peaks) - most} more"] if len(peaks) > most else []
    total = size(integer(summary, "peak_rss_bytes_total"))
    # each peak has the pages that processes share, and is at a time of its own
    return f"at most {total} together: {', '.join(shares + more)}" if peaks else UNKNOWN


def _file_rows(summary: Summary) -> list[tuple[str, str]]:
    names = {"export": "Trained model", "checkpoint": "Checkpoint", "metrics": "Metrics", "curves": "Curves"}
    there = {label: str(summary[key]) for key, label in names.items() if summary.get(key)}
    return [*({"Trained model": NO_EXPORT} | there).items()]


def _counts(values: Mapping[str, Json], key: str) -> dict[str, int]:
    found = values.get(key)
    return {name: integer(found, name) for name in found} if isinstance(found, dict) else {}


def _known(summary: Summary, key: str) -> float | None:
    value = number(summary, key)
    return value if isfinite(value) else None
