"""A figure over several seeds, as reports and tables show it."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite, isnan
from statistics import median
from typing import Self

from bus.codec import Json

NEVER = "-"
"""What tables show for a target that was not reached."""


@dataclass(frozen=True)
class Spread:
    """A figure over seeds; one that was not reached counts as infinite."""

    middle: float
    lowest: float
    highest: float
    seeds: int
    reached: int
    """Seeds whose figure is finite."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return median, least and largest."""
        found = sorted(inf if isnan(value) else value for value in values)
        return cls(median(found), found[0], found[-1], len(found), sum(map(isfinite, found)))

    def to_json(self) -> dict[str, Json]:
        """Return it with None for what is infinite."""
        pairs = (("median", self.middle), ("lowest", self.lowest), ("highest", self.highest))
        return {
            **{name: value if isfinite(value) else None for name, value in pairs},
            "seeds": self.seeds,
            "reached": self.reached,
        }

    def text(self, form: str) -> str:
        """Return it as a table shows it: the median, and half of the range, or how many seeds have it."""
        middle = format(self.middle, form) if isfinite(self.middle) else NEVER
        if self.reached < self.seeds:
            return f"{middle} ({self.reached}/{self.seeds})" if self.reached else middle
        return middle if self.seeds == 1 else f"{middle}±{(self.highest - self.lowest) / 2:{form}}"
