"""Bounds the figures that data name, by parts of rewards and by sources, over all steps of a learner."""

from collections.abc import Mapping

import structlog

from bus.codec import Json

log = structlog.get_logger()
NAMED_BY_DATA = ("reward_part/", "source_")
"""Beginnings of the figures whose names are not Sluice's own."""
MOST_FIGURES = 1000
"""Such figures that have curves: names that change with each step would make files and screens grow without
end."""
LEFT_OUT = "train/figures_left_out"
"""Number of the figures of a step that are left out."""


class NamedFigures:
    """Lets those figures pass that came first, and counts the others."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._is_told = False

    def bounded(self, values: Mapping[str, Json]) -> dict[str, Json]:
        """Return the values of a step without named figures beyond the bound; those are counted."""
        named = [name for name in values if name.startswith(NAMED_BY_DATA)]
        new = [name for name in named if name not in self._known]
        room = MOST_FIGURES - len(self._known)
        self._known.update(new[:room])
        left_out = new[room:]
        if left_out and not self._is_told:
            self._is_told = True
            log.warning("figures_left_out", first=left_out[0], most=MOST_FIGURES)
        dropped = {*left_out}
        kept = {name: value for name, value in values.items() if name not in dropped}
        return kept | ({LEFT_OUT: len(left_out)} if left_out else {})
