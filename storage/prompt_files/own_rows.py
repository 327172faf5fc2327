"""Rows that a function of the user's own yields, where a file of prompts may stand."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from bus.codec import Json
from bus.errors import ConfigError, SluiceError, with_traceback
from bus.process.plugins import load_function

MOST_ROWS = 1_000_000
"""Rows that are read of a source which has to end."""


class RowSource(Protocol):
    """Yields the rows of a source of prompts, without an end if it has none."""

    def __call__(self, position: int) -> Iterable[Mapping[str, Json]]:
        """Yield the rows from `position` on, counted from 0: the same row at the same position each time."""


def own_rows(source: Path, position: int = 0) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield the place and the values of each row from `position` on.

    Raises `ConfigError` for a function that cannot be loaded, raises or yields what is no row."""
    function: RowSource = load_function("source of prompts", str(source), {})
    what = f"data source {str(source)!r}"
    try:
        for number, values in enumerate(function(position), start=position + 1):
            yield f"{what}, row {number}", _checked(values, f"{what}, row {number}")
    except SluiceError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise ConfigError(
            with_traceback(f"{what} raised {error!r} for rows from {position} on", error)
        ) from error


def _checked(values: object, where: str) -> dict[str, Json]:
    if not isinstance(values, Mapping):
        raise ConfigError(
            f'{where}: a {type(values).__name__}, not an object: yield one like {{"prompt": ...}}'
        )
    return dict(values)


def ending_rows(source: Path) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield all rows. Raises `ConfigError` also for a source that does not end."""
    for number, row in enumerate(own_rows(source)):
        if number == MOST_ROWS:
            raise ConfigError(
                f"data source {str(source)!r} goes on after {MOST_ROWS} rows: name it in data.prompts, which "
                f"reads an endless source as rows are needed, or a slice of it, as {source}@[:1000]"
            )
        yield row
