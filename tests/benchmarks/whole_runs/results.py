"""The outcomes of a benchmark in one file, a line each, so that a later call goes on where one has ended."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from benchmarks.whole_runs.cells import CellOutcome, NamedCell
from bus.codec import Json
from bus.errors import ConfigError
from storage.disk.atomic_files import fsync_path, make_directory
from storage.metrics.records import Record, append_records, read_records

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
        found = map(read, read_records(self.path))
        self.outcomes: dict[NamedCell, AnyOutcome] = {outcome.cell: outcome for outcome in found}

    def refuse_others(self, wanted: Callable[[AnyOutcome], str]) -> None:
        """Raise `ConfigError` if outcomes were measured with other settings, or from another model, than
        `wanted` says of them."""
        other = next((o for o in self.outcomes.values() if o.settings != wanted(o)), None)
        if other is not None:
            raise ConfigError(
                f"{self.path} holds outcomes of other settings or of another initial model, such as "
                f"{other.cell.name}: give the settings that they had, or another --directory"
            )

    def add(self, outcome: AnyOutcome) -> None:
        """Append an outcome, durably."""
        make_directory(self.path.parent)
        append_records(self.path, [outcome.to_json()])
        fsync_path(self.path)
        self.outcomes[outcome.cell] = outcome
