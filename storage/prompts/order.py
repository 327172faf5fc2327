"""Which prompt each lease of a run is for: data sets follow one another, and so do their mixtures."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from storage.prompts.mixture import MixtureOrder, PromptOrder, PromptSource


@dataclass(frozen=True, slots=True)
class DataSet:
    """Prompts, and the leases that are issued for them: from `first_lease` on, until another takes over."""

    first_lease: int
    digest: str
    """Digest of the prompts in their order."""
    count: int
    seed: int
    shuffle: bool
    source: str
    """Origin of the prompts, for a human."""
    added: str = ""
    """Digest of prompts that were added while the run went on, so that adding twice adds once."""
    sources: tuple[PromptSource, ...] = ()
    """Sources that are mixed, whose prompts follow one another; none where all prompts are one source."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return what `dataclasses.asdict` made a table of."""
        return cls(**{**values, "sources": tuple(PromptSource(**one) for one in values.get("sources", ()))})


class DataSetOrder:
    """Maps the number of a lease to a data set and a prompt in it, as a pure function."""

    def __init__(self, data_sets: Sequence[DataSet]) -> None:
        """Use `data_sets` in the order of their first leases, which begin at 0."""
        self._data_sets = data_sets
        self._orders = [_order(known) for known in data_sets]

    def find(self, lease_id: int) -> tuple[DataSet, int]:
        """Return the data set of a lease, and the index of its prompt there."""
        n = self._number(lease_id)
        found = self._data_sets[n]
        return found, self._orders[n].index(lease_id - found.first_lease)

    def source(self, lease_id: int) -> str:
        """Return the name of the source of a lease's prompt; empty where its data set is no mixture."""
        n = self._number(lease_id)
        found, order = self._data_sets[n], self._orders[n]
        if not isinstance(order, MixtureOrder):
            return ""
        return found.sources[order.source(lease_id - found.first_lease)].name

    def drawn(self, lease_id: int) -> dict[str, int]:
        """Return how many prompts each source of a lease's data set has given before that lease, by name."""
        n = self._number(lease_id)
        found, order = self._data_sets[n], self._orders[n]
        if not isinstance(order, MixtureOrder):
            return {}
        names = [source.name for source in found.sources]
        return dict(zip(names, order.drawn(lease_id - found.first_lease), strict=True))

    def _number(self, lease_id: int) -> int:
        return bisect_right(self._data_sets, lease_id, key=lambda known: known.first_lease) - 1


@lru_cache(maxsize=1024)  # a curriculum adds data sets all the time
def _order(known: DataSet) -> PromptOrder | MixtureOrder:
    if known.sources:
        return MixtureOrder(known.sources, known.seed, known.shuffle)
    return PromptOrder(known.count, known.seed, known.shuffle)
