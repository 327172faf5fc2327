"""Rows of metrics.jsonl, one JSON object for every step and every evaluation, and of counters.jsonl.

The actors' counters, which come every second, lie in counters.jsonl, of which only the latest are kept."""

import json
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite, nan
from pathlib import Path

from bus.codec import Json
from bus.evaluation_messages import EvaluationResult
from bus.messages import Metrics
from storage.disk.atomic_files import append_lines

Record = dict[str, Json]
"""One line: time_s (since the epoch), source, step, kind ("metrics" or "evaluation") and the values."""
ENDED = "ended"
"""Name under which an actor's last counters say why it ended, where no restart mends that."""
KEPT_BYTES = 32 << 20
"""Size from which a file of which only the latest lines are kept is continued in a new one."""
TAIL_BYTES = 4 << 20
"""Bytes at the end of a file in which its last line is looked for."""


def metrics_record(metrics: Metrics) -> Record:
    head: Record = {
        "time_s": metrics.time_s,
        "source": metrics.source,
        "step": metrics.step,
        "kind": "metrics",
    }
    return head | metrics.values


def evaluation_record(
    result: EvaluationResult, *, step: int, time_s: float, learner_version: int | None = None
) -> Record:
    """Return the line for a held-out evaluation.

    Args:
        result: what was measured.
        step: made the evaluated version.
        time_s: when the result came, since the epoch.
        learner_version: the learner's newest version then; None if it is not known."""
    oldest, newest = result.drawn_by
    further: Record = {} if not result.data_set else {"data_set": result.data_set, "samples": result.samples}
    if learner_version is not None:
        further["lag_versions"] = max(0, learner_version - result.policy_version)
    return {
        "time_s": time_s,
        "source": "evaluation",
        "step": step,
        "kind": "evaluation",
        "policy_version": result.policy_version,
        "incarnation": result.incarnation,
        "sampled": result.sampled,
        "greedy": result.greedy,
        "prompts": result.prompts,
        "seconds": result.seconds,
        "oldest_version": oldest,
        "newest_version": newest,
        "failed": result.failed,
        **further,
        **result.scores,
    }


def event_record(
    event: Metrics | EvaluationResult, *, trains_from: int, time_s: float, learner_version: int | None = None
) -> Record:
    """Return the line that an event makes, of an evaluation one that came at `time_s`. Reinforcement learning
    began with the version `trains_from`."""
    if isinstance(event, Metrics):
        return metrics_record(event)
    step = max(0, event.policy_version - trains_from)
    return evaluation_record(event, step=step, time_s=time_s, learner_version=learner_version)


def append_records(path: Path, records: Iterable[Record]) -> None:
    append_lines(path, map(_finite, records))


def append_latest(path: Path, records: Iterable[Record]) -> None:
    """Append lines as `append_records` does, and keep only the latest: at most `KEPT_BYTES` twice. Older
    lines lie in the file that `older` names."""
    if path.exists() and path.stat().st_size > KEPT_BYTES:
        path.replace(older(path))
    append_records(path, records)


def older(path: Path) -> Path:
    """Return where lines go that are older than those in `path`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def read_records(path: Path) -> Iterator[Record]:
    """Return every complete line of the file, which may be missing."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from filter(None, map(_parsed, lines))


def latest_records(path: Path, within_bytes: int) -> list[Record]:
    """Return every complete line in the last `within_bytes` of the file, which may be missing."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = max(0, file.seek(0, 2) - within_bytes)
        file.seek(start)
        lines = file.read().splitlines()
    return parsed(lines[1:] if start else lines)  # the first line is cut off


def last_record(path: Path) -> Record | None:
    """Return the last complete line of the file, if it has one."""
    return next(reversed(latest_records(path, TAIL_BYTES)), None)


def parsed(lines: Iterable[str | bytes]) -> list[Record]:
    """Return the complete lines: the first may be cut off, and the last one that of a killed writer."""
    return list(filter(None, map(_parsed, lines)))


def _parsed(line: str | bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def is_counters(record: Record) -> bool:
    """Tell whether a record has an actor's counters, which the next one replaces."""
    return "engine/busy_s" in record


def number(values: Mapping[str, Json], key: str) -> float:
    """Return the value as a float; NaN when it is missing or no number."""
    value = values.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else nan


def integer(values: Mapping[str, Json], key: str) -> int:
    """Return the value as an int; 0 when it is missing or no finite number."""
    value = number(values, key)
    return int(value) if isfinite(value) else 0


def _finite(record: Record) -> Record:
    """Replace NaN and infinity by null, since JSON has neither."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in record.items()}
