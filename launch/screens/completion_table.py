"""A table of completions for the terminal, a line each, which can be written as they come and be piped."""

import re
import shutil

from rich.cells import cell_len, set_cell_size

from bus.codec import Json

WIDTH = 160
"""Characters of a line that does not go to a terminal."""
COLUMNS = (
    ("trajectory", 12), ("version", 9), ("reward", 8), ("advantage", 9), ("tokens", 6), ("end", 10),
    ("parts", 24),
)  # fmt: skip
_UNSEEN = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
CUT = " \N{HORIZONTAL ELLIPSIS} "


class CompletionTable:
    """Makes lines of the objects of `launch tail`; the first one has the names of the columns above it."""

    def __init__(self, width: int | None = None) -> None:
        """Fill `width` characters, by default those of the terminal."""
        width = width or shutil.get_terminal_size((WIDTH, 24)).columns
        rest = max(24, width - sum(size + 1 for _, size in COLUMNS))
        self._columns = (*COLUMNS, ("prompt", rest // 3), ("answer", rest - rest // 3 - 1))
        self._begun = False

    def __call__(self, found: dict[str, Json]) -> str:
        """Return the line of a trajectory."""
        head = "" if self._begun else self._line([name for name, _ in self._columns]) + "\n"
        self._begun = True
        return head + self._line(_cells(found))

    def _line(self, cells: list[str]) -> str:
        sized = (shortened(text, size) for text, (_, size) in zip(cells, self._columns, strict=True))
        return " ".join(sized).rstrip()


def _cells(found: dict[str, Json]) -> list[str]:
    oldest, newest = found["oldest_version"], found["newest_version"]
    texts = found["parts"]
    parts = [part for part in texts if isinstance(part, dict)] if isinstance(texts, list) else []
    first = next((n for n, part in enumerate(parts) if part["by"] == "policy"), len(parts))
    return [
        str(found["trajectory_id"]),
        "" if oldest is None else f"{oldest}" if oldest == newest else f"{oldest}-{newest}",
        number(found["reward"]),
        number(found["advantage"]),
        str(found["tokens"]),
        str(found["end"]),
        " ".join(f"{name}={number(value)}" for name, value in reward_parts(found)),
        "".join(str(part["text"]) for part in parts[:first]),
        "".join(str(part["text"]) for part in parts[first:]),
    ]


def reward_parts(found: dict[str, Json]) -> list[tuple[str, Json]]:
    """Return the names and values of the parts of the reward."""
    components = found["reward_components"]
    return [*components.items()] if isinstance(components, dict) else []


def number(value: Json) -> str:
    """Return a number with four digits, and nothing for one that is not known."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, int | float) else str(value)


def shortened(text: str, size: int) -> str:
    """Return the text on one line in exactly `size` cells; of a longer one its middle is left out."""
    text = _UNSEEN.sub(" ", text).strip()
    if cell_len(text) <= size or size < 3 * len(CUT):
        return set_cell_size(text, size)
    last = (size - len(CUT)) // 3
    return set_cell_size(set_cell_size(text, size - len(CUT) - last).rstrip() + CUT + _end(text, last), size)


def _end(text: str, size: int) -> str:
    """Return the end of a text that has at most `size` cells."""
    end = text[-size:]
    while cell_len(end) > size:
        end = end[1:]
    return end
