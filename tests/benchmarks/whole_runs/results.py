"""The outcomes of a benchmark in one file, a line each, so that a later call goes on where one has ended."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import structlog

from benchmarks.whole_runs.cells import CellOutcome, NamedCell
from bus.codec import Json
from storage.disk.atomic_files import fsync_path, make_directory
from storage.metrics.records import Record, append_records, read_records

log = structlog.get_logger()
AnyOutcome = TypeVar("AnyOutcome", bound=CellOutcome)


@dataclass(frozen=True, kw_only=True)
class OutcomeLine:
    """Base of outcomes: fields of texts, numbers and tuples of these, which are a line of the file."""

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the outcome of a line of the results. Raises `TypeError` or `KeyError` for another line."""
        found: dict[str, Any] = {field.name: values[field.name] for field in fields(cls)}
        for name, value in found.items():
            found[name] = tuple(value) if isinstance(value, list) else value
        return cls(**found)

    def to_json(self) -> dict[str, Json]:
        """Return it as a line of the results."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


class Results(Generic[AnyOutcome]):
    """The outcomes that a file holds."""

    def __init__(self, path: Path, read: Callable[[Record], AnyOutcome]) -> None:
        """Read what is there, each line by `read`; a line that was cut off is none."""
        self.path = path
        self._lines = list(map(read, read_records(self.path)))
        self.outcomes: dict[NamedCell, AnyOutcome] = {outcome.cell: outcome for outcome in self._lines}
        self.left_out: list[str] = []
        """Names of the cells with lines that `leave_out_others` took out."""

    def leave_out_others(self, wanted: Callable[[AnyOutcome], str]) -> None:
        """Take out the outcomes that were measured with other settings, or from another model, than `wanted`
        says of them. Their lines stay in the file, and the log names them."""
        self.left_out = sorted({o.cell.name for o in self._lines if o.settings != wanted(o)})
        self.outcomes = {o.cell: o for o in self._lines if o.settings == wanted(o)}
        if self.left_out:
            log.warning(
                "outcomes_of_other_settings", file=str(self.path), cells=", ".join(self.left_out),
                remedy="they are measured again; or give the settings or the initial model that they had",
            )  # fmt: skip

    def add(self, outcome: AnyOutcome) -> None:
        """Append an outcome, durably."""
        make_directory(self.path.parent)
        append_records(self.path, [outcome.to_json()])
        fsync_path(self.path)
        self._lines.append(outcome)
        self.outcomes[outcome.cell] = outcome
