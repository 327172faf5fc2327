"""What benchmarks of whole runs know of their cells, and lists with commas by which a user chooses them."""

import difflib
from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from bus.errors import ConfigError

if TYPE_CHECKING:  # numpy takes a while to load, and --help needs none
    from bus.codec import Json


class NamedCell(Hashable, Protocol):
    """One run of a benchmark, as a frozen value."""

    @property
    def name(self) -> str:
        """Return a name that is also that of the run."""


AnyCell = TypeVar("AnyCell", bound=NamedCell)


class CellOutcome(Protocol):
    """What a run of one cell was like."""

    @property
    def cell(self) -> NamedCell:
        """Return which cell it is of."""

    @property
    def settings(self) -> str:
        """Return the digest of what the cells have in common; outcomes of one digest may be compared."""

    def figures(self) -> dict[str, float]:
        """Return what tables show; NaN for what was not reached."""

    def to_json(self) -> "dict[str, Json]":
        """Return it as a line of the results."""


def chosen_names(flag: str, text: str, there_are: Collection[str]) -> tuple[str, ...]:
    """Return the names of a list with commas, in the order of what there is; all for an empty one.

    Raises `ConfigError` for one that there is not."""
    wanted = parts(text)
    for name in wanted:
        if name not in there_are:
            close = difflib.get_close_matches(name, there_are, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"{flag} {text}: no {name!r}: {hint}there are: {', '.join(there_are)}")
    return tuple(name for name in there_are if not wanted or name in wanted)


def chosen_numbers(flag: str, text: str, default: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of a list with commas, ascending; the default for an empty one.

    Raises `ConfigError` for what is no number from 0 upwards."""
    try:
        found = {int(part) for part in parts(text)}
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: give whole numbers with commas, such as 0,8") from error
    if min(found, default=0) < 0:
        raise ConfigError(f"{flag} {text}: give numbers from 0 upwards")
    return tuple(sorted(found)) or tuple(default)


def parts(text: str) -> list[str]:
    """Return the parts between the commas that are not empty."""
    return [part.strip() for part in text.split(",") if part.strip()]
