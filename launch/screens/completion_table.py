"""A table of completions for the terminal, a line each, which can be written as they come and be piped."""

import re
import shutil

from rich.cells import cell_len, set_cell_size

from bus.codec import Json

WIDTH = 160
"""Characters of a line that does not go to a terminal."""
COLUMNS = {"trajectory": 12, "version": 9, "reward": 8, "advantage": 9, "tokens": 6, "end": 10, "parts": 24}
"""Characters of each column beside prompt and answer."""
DROPPED = ("parts", "end", "version", "tokens")
"""Columns that a narrow terminal does not show, the first ones first."""
LEAST_TEXT = 40
"""Characters that prompt and answer have together, at least."""
_UNSEEN = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
CUT = " \N{HORIZONTAL ELLIPSIS} "


class CompletionTable:
    """Makes lines of the objects of `launch tail`; the first one has the names of the columns above it."""

    def __init__(self, width: int | None = None) -> None:
        self._width = width or shutil.get_terminal_size((WIDTH, 24)).columns
        self._sizes: dict[str, int] = {}
        """Characters of each column, from the first trajectory on."""

    def __call__(self, found: dict[str, Json]) -> str:
        head = ""
        if not self._sizes:
            self._sizes = _sizes(self._width, has_parts=bool(reward_parts(found)))
            head = self._line({name: name for name in self._sizes}) + "\n"
        return head + self._line(_cells(found))

    def _line(self, cells: dict[str, str]) -> str:
        return " ".join(shortened(cells[name], size) for name, size in self._sizes.items()).rstrip()


def _sizes(width: int, *, has_parts: bool) -> dict[str, int]:
    sizes = COLUMNS if has_parts else {name: size for name, size in COLUMNS.items() if name != "parts"}
    for dropped in DROPPED:
        if width - sum(sizes.values()) - len(sizes) >= LEAST_TEXT:
            break
        sizes = {name: size for name, size in sizes.items() if name != dropped}
    rest = max(LEAST_TEXT, width - sum(sizes.values()) - len(sizes))
    return sizes | {"prompt": rest // 3, "answer": rest - rest // 3 - 1}


def _cells(found: dict[str, Json]) -> dict[str, str]:
    oldest, newest = found["oldest_version"], found["newest_version"]
    texts = found["parts"]
    parts = [part for part in texts if isinstance(part, dict)] if isinstance(texts, list) else []
    first = next((n for n, part in enumerate(parts) if part["by"] == "policy"), len(parts))
    return {
        "trajectory": str(found["trajectory_id"]),
        "version": "" if oldest is None else f"{oldest}" if oldest == newest else f"{oldest}-{newest}",
        "reward": number(found["reward"]),
        "advantage": number(found["advantage"]),
        "tokens": str(found["tokens"]),
        "end": str(found["end"]),
        "parts": " ".join(f"{name}={number(value)}" for name, value in reward_parts(found)),
        "prompt": "".join(str(part["text"]) for part in parts[:first]),
        "answer": "".join(str(part["text"]) for part in parts[first:]),
    }


def reward_parts(found: dict[str, Json]) -> list[tuple[str, Json]]:
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
    end = text[-size:]
    while cell_len(end) > size:
        end = end[1:]
    return end
