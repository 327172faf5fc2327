"""Where each setting of a run comes from: a default, a preset, a file, the environment or a flag."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launch.settings.run_config import Layer, merge

Location = tuple[str, ...]
DEFAULT = "default"


@dataclass(frozen=True)
class Source:
    """Some settings and their origin."""

    origin: str
    """Origin of the settings, for a human: `preset sort`, `file mine.toml`, `environment SLUICE_RUN`."""
    layer: Layer


@dataclass(frozen=True)
class _Leaf:
    value: Any
    origin: str


def merged(sources: Iterable[Source]) -> dict[str, Any]:
    """Return the settings of all sources in one layer; the last wins."""
    return merge(*(source.layer for source in sources))


class Origins:
    """Tells of each setting which of `sources` gave it. They are laid over each other as `merge` does."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self.replaced: list[str] = []
        """What was left out of tables that a later source gave another `type`, a sentence for each table."""
        self._tree: dict[str, Any] = {}
        for source in sources:
            self._lay(self._tree, source.layer, source.origin, ())

    def of(self, location: Location) -> str:
        """Return the origin of the setting at `location`; of a table's entry, that of the whole table."""
        found: Any = self._tree
        for part in location:
            if not isinstance(found, dict):
                break
            found = found.get(part)
        return found.origin if isinstance(found, _Leaf) else DEFAULT

    def _lay(self, tree: dict[str, Any], layer: Layer, origin: str, above: Location) -> None:
        for key, value in layer.items():
            here = (*above, key)
            if not isinstance(value, Mapping):
                tree[key] = _Leaf(value, origin)
                continue
            below = tree.get(key)
            if not isinstance(below, dict) or _of_another_type(below, value):
                self.replaced += _replaced(below, value, origin, here) if isinstance(below, dict) else ()
                below = tree[key] = {}
            self._lay(below, value, origin, here)


def _replaced(below: Mapping[str, Any], value: Layer, origin: str, here: Location) -> Iterator[str]:
    """Yield what a table of another type leaves out of the one before, if that is more than its type."""
    gone = [
        f"{'.'.join((*here, *at))} ({leaf.origin})"
        for at, leaf in leaves(below)
        if at[-1] != "type" and at[0] not in value and isinstance(leaf, _Leaf)
    ]
    if gone:
        kind = f"{'.'.join((*here, 'type'))}={value['type']}"
        yield f"{kind} ({origin}) replaces {below['type'].value}, and leaves out {', '.join(gone)}"


def leaves(table: Mapping[str, Any], above: Location = ()) -> Iterator[tuple[Location, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


def by_name(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return each plain setting of a table by its name, such as learner.steps."""
    return {".".join(location): value for location, value in leaves(table)}


def _of_another_type(below: Mapping[str, Any], value: Layer) -> bool:
    before = below.get("type")
    return isinstance(before, _Leaf) and value.get("type", before.value) != before.value
