"""Orders of visits to prompts that one integer resumes: over the epochs of one file, over several sources in
exact fractions, and over the data sets of a run."""

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from bus.errors import ConfigError

WINDOW = 1000
"""Prompts in which each source has exactly its share, in thousandths."""


class PromptOrder:
    """The endless sequence of epochs over `count` prompts, each in an order of its own drawn from `seed`."""

    def __init__(self, count: int, seed: int, shuffle: bool) -> None:
        if count < 1:
            raise ConfigError("no prompts to order: give at least one")
        self._count = count
        self.seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def epoch(self, position: int) -> int:
        return position // self._count

    def index(self, position: int) -> int:
        """Return the index of the position-th prompt, counted from 0 over all epochs."""
        epoch, place = divmod(position, self._count)
        if not self._shuffle:
            return place
        order = self._order
        if order[0] != epoch:
            order = self._order = (epoch, self._permutation(epoch))
        return int(order[1][place])

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        # numpy keeps raw bit streams the same across versions, but not Generator.permutation
        keys = np.random.PCG64([self.seed, epoch]).random_raw(self._count)
        return np.argsort(keys, kind="stable")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A source's place in a data set: its prompts follow those of the sources before it."""

    name: str
    count: int
    digest: str
    """Digest of its prompts in their order."""
    weight: float
    """The source's configured weight, relative to those of the others."""
    share: int = 0
    """Prompts of each `WINDOW` that come from it."""
    drawn: int = 0
    """Prompts that were drawn from the source before: it goes on there."""


def shares(weights: Sequence[float]) -> list[int]:
    """Return how many of `WINDOW` prompts each source has: the weights, rounded by largest remainders. Each
    has one at least. Raises `ConfigError` when they are too many for that."""
    if len(weights) > WINDOW:
        raise ConfigError(
            f"{len(weights)} sources of prompts, and there can be {WINDOW}: join some, or choose another "
            "field for buckets"
        )
    wanted = WINDOW * np.asarray(weights, np.float64) / np.sum(weights)
    found = np.maximum(1, np.floor(wanted)).astype(np.int64)
    while (missing := WINDOW - int(found.sum())) != 0:
        rest = wanted - found
        if missing > 0:
            found[np.argmax(rest)] += 1
        else:  # sources with more than they want pay for those that were lifted to 1
            found[np.argmin(np.where(found > 1, rest, np.inf))] -= 1
    return [int(share) for share in found]


@lru_cache(maxsize=64)
def _pattern(parts: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each place in a window, and how many places before it are of the same source. The
    j-th of n prompts of a source wants to be at (j + 1/2) / n of the window: sources alternate evenly."""
    wanted = np.concatenate([(np.arange(part) + 0.5) / part for part in parts])
    sources = np.repeat(np.arange(len(parts)), parts)
    before = np.concatenate([np.arange(part) for part in parts])
    places = np.lexsort((sources, wanted))
    return sources[places], before[places]


class MixtureOrder:
    """The endless sequence of prompts of several sources, each in epochs of its own. Within each window every
    source has exactly its share, whatever the lengths of the sources."""

    def __init__(self, sources: Sequence[PromptSource], seed: int, shuffle: bool) -> None:
        self._sources = sources
        divisor = gcd(*(source.share for source in sources))
        self._parts = tuple(source.share // divisor for source in sources)
        self._window = sum(self._parts)
        self._orders = [_source_order(source.name, source.count, seed, shuffle) for source in sources]
        self._first = np.cumsum([0, *(source.count for source in sources)]).tolist()

    def source(self, position: int) -> int:
        """Return the number of the source of the position-th prompt."""
        of_place, _ = _pattern(self._parts)
        return int(of_place[position % self._window])

    def index(self, position: int) -> int:
        """Return the index of the position-th prompt, among those of all sources one after the other."""
        window, place = divmod(position, self._window)
        of_place, before = _pattern(self._parts)
        n = int(of_place[place])
        drawn = self._sources[n].drawn + window * self._parts[n] + int(before[place])
        return int(self._first[n] + self._orders[n].index(drawn))

    def drawn(self, position: int) -> list[int]:
        """Return how many prompts of each source come before the position-th, with those drawn before."""
        window, place = divmod(position, self._window)
        within = np.bincount(_pattern(self._parts)[0][:place], minlength=len(self._parts)).tolist()
        each = zip(self._sources, self._parts, within, strict=True)
        return [source.drawn + window * part + extra for source, part, extra in each]


@lru_cache(maxsize=256)
def _source_order(name: str, count: int, seed: int, shuffle: bool) -> PromptOrder:
    return PromptOrder(count, xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()), shuffle)


class PickedOrder:
    """The sequence of prompts that somebody picked so far."""

    def __init__(self) -> None:
        self.picked = array("q")

    def index(self, position: int) -> int:
        """Return the index of the position-th prompt, which must have been picked."""
        return self.picked[position]


NOTHING_PICKED: Mapping[int, PickedOrder] = {}


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
    next_row: int | None = None
    """Row of a source of the user's own that follows these prompts; None where they are all there are."""
    is_picked: bool = False
    """Whether a sampler of the user's own decides on the order."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return what `dataclasses.asdict` made a table of."""
        return cls(**{**values, "sources": tuple(PromptSource(**one) for one in values.get("sources", ()))})


class DataSetOrder:
    """Maps the number of a lease to a data set and a prompt in it, as a pure function."""

    def __init__(
        self, data_sets: Sequence[DataSet], picked: Mapping[int, PickedOrder] = NOTHING_PICKED
    ) -> None:
        """Use `data_sets` in the order of their first leases, which begin at 0; `picked` has the orders of
        those that are picked, by these leases."""
        self._data_sets = data_sets
        self._orders = [
            picked[known.first_lease] if known.is_picked else _order(known) for known in data_sets
        ]

    def find(self, lease_id: int) -> tuple[DataSet, int]:
        """Return the data set of a lease, and the index of its prompt there."""
        n = self._number(lease_id)
        found = self._data_sets[n]
        return found, self._orders[n].index(lease_id - found.first_lease)

    def data_set(self, lease_id: int) -> DataSet:
        return self._data_sets[self._number(lease_id)]

    def source(self, lease_id: int) -> str:
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
