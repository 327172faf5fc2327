"""Data sets of a run: the leases that each is for, a copy of each, and quarantined prompts."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import structlog

from bus.errors import ConfigError
from bus.messages import Prompt
from storage.ledger.ledger import Ledger
from storage.prompt_files.stored_prompts import StoredPrompts, digest_of, open_stored, store_prompts
from storage.prompts.order import DataSet, DataSetOrder, PickedOrder, PromptSource, shares
from storage.prompts.sources import with_source

log = structlog.get_logger()
_DATA_SET, _QUARANTINED, _PICKED = "data_set.", "quarantined.", "picked."
_CONFIGURED = "data_configured"
"""Prefixes of the names of the ledger's facts that belong here, and one name."""
PICKS_OF_FACT = 1024
"""Picked prompts that one fact of the ledger holds."""
_TOO_LONG = "too long"
"""Value of such a fact of a quarantined prompt that no actor has seen."""


class DataSets:
    """Data sets as the ledger records them. A change is durable once the ledger is flushed.

    Every data set is copied into `directory` before it is used, so that an open lease keeps its prompt
    whatever happens to the file."""

    def __init__(self, ledger: Ledger, directory: Path) -> None:
        self._ledger = ledger
        self._directory = directory
        self._prompts: dict[str, StoredPrompts] = {}
        self._known = {found.first_lease: found for found in recorded(ledger.facts)}
        """Data sets by their first lease, in that order."""
        self._quarantined: set[tuple[str, int]] = set()
        for name in ledger.facts:
            if name.startswith(_QUARANTINED):
                _, digest, index = name.split(".")
                self._quarantined.add((digest, int(index)))
        self._picked = recorded_picks(ledger.facts)
        self._order = DataSetOrder(list(self._known.values()), self._picked)

    @property
    def latest(self) -> DataSet:
        """Data set that leases are issued for now."""
        return next(reversed(self._known.values()))

    @property
    def prompts(self) -> StoredPrompts:
        return self._prompts[self.latest.digest]

    @property
    def quarantined(self) -> int:
        return len(self.quarantined_indices())

    def configure(
        self, prompts: Sequence[Prompt], *,
        seed: int, shuffle: bool, source: str, sources: Sequence[PromptSource] = (),
        is_stream: bool = False, is_picked: bool = False,
    ) -> None:  # fmt: skip
        """Start with the configuration's data set, or the ledger's latest if that has not changed.

        Where weights or other sources have changed, a source goes on behind the prompts drawn from it. Of a
        stream `prompts` are the first, and its name says whether it has changed. Where the order `is_picked`,
        `pick` follows.

        Reads the copies that leases need, which blocks. Raises `StorageError` when one is gone."""
        digest = self._copied(prompts).digest
        weights = [[[one.name, one.count, one.weight] for one in sources]] if sources else []
        picked = ["picked"] if is_picked else []
        configured = json.dumps([source] if is_stream else [digest, seed, shuffle, *weights, *picked])
        if self._ledger.facts.get(_CONFIGURED) != configured:
            # a ledger from before data sets were noted knows only one
            first = self._ledger.next_id if self._known else 0
            mixed = self._continued(sources, first, seed=seed, shuffle=shuffle)
            found = DataSet(first, digest, len(prompts), seed, shuffle, source, sources=mixed)
            if is_stream:
                found = replace(found, shuffle=False, next_row=len(prompts))
            self._take_over(replace(found, is_picked=is_picked))
            self._ledger.set_fact(_CONFIGURED, configured)
        for known in self._needed():
            if known.digest not in self._prompts:
                self._prompts[known.digest] = open_stored(self._directory, known.digest, source=known.source)

    async def add(self, prompts: Sequence[Prompt], *, keep_old: bool, source: str) -> DataSet:
        """Use `prompts` from the next lease on, after those of the latest data set if `keep_old`.

        Adding the same prompts twice in a row changes nothing. One call at a time. Raises `StorageError`, and
        `ConfigError` for prompts that would be added to a mixture."""
        before = self.latest
        if keep_old and before.sources:
            names = ", ".join(one.name for one in before.sources)
            raise ConfigError(
                f"the run mixes prompts of several sources ({names}): add these as another of data.sources "
                "and start the run again, which goes on where it was; or replace all of them"
            )
        added = ("+" if keep_old else "") + await asyncio.to_thread(digest_of, prompts)
        if before.added == added:
            return before
        everything = chain(self.prompts, prompts) if keep_old else prompts
        stored = await asyncio.to_thread(self._copied, everything)
        if keep_old:
            for _, index in [entry for entry in self._quarantined if entry[0] == before.digest]:
                self._quarantine(stored.digest, index, "as before")
        self._take_over(
            replace(
                before,
                first_lease=self._ledger.next_id,
                digest=stored.digest,
                count=len(stored),
                source=f"{before.source} and {source}" if keep_old else source,
                added=added,
                sources=(),
            )
        )
        return self.latest

    def go_on(self, prompts: StoredPrompts, *, next_row: int) -> None:
        """Use further prompts of the latest data set's source behind its own; `next_row` follows them."""
        before = self.latest
        first = before.first_lease + before.count
        self._prompts[prompts.digest] = prompts
        self._take_over(
            replace(before, first_lease=first, digest=prompts.digest, count=len(prompts), next_row=next_row)
        )
        needed = {known.digest for known in self._needed()}  # each that is open holds a file
        self._prompts = {digest: found for digest, found in self._prompts.items() if digest in needed}

    def _needed(self) -> set[DataSet]:
        now = self._order.data_set(self._ledger.next_id).first_lease
        to_come = (known for first, known in self._known.items() if first >= now)
        return {*to_come, *map(self._order.data_set, self._ledger.rolling_out)}

    @property
    def picked(self) -> Sequence[int]:
        """Return the prompts of the latest data set that were picked, in the order of its leases."""
        return self._picked[self.latest.first_lease].picked

    def pick(self, indices: Sequence[int]) -> None:
        """Issue these prompts of the latest data set behind those that were picked."""
        first, order = self.latest.first_lease, self._picked[self.latest.first_lease].picked
        before = len(order)
        order.extend(indices)
        for begin in range(before - before % PICKS_OF_FACT, len(order), PICKS_OF_FACT):
            picks = " ".join(map(str, order[begin : begin + PICKS_OF_FACT]))
            self._ledger.set_fact(f"{_PICKED}{first:012d}.{begin:012d}", picks)

    def index(self, lease_id: int) -> tuple[str, int]:
        """Return the digest of a lease's data set, and the index of its prompt there."""
        found, index = self._order.find(lease_id)
        return found.digest, index

    def quarantined_indices(self) -> list[int]:
        """Return the indices of the quarantined prompts in the latest data set."""
        return [index for digest, index in self._quarantined if digest == self.latest.digest]

    def mix(self, weights: Mapping[str, float]) -> None:
        """Draw from the sources by these weights from the next lease on; each goes on where it is."""
        before, first = self.latest, self._ledger.next_id
        drawn = self._order.drawn(first)
        each = zip(before.sources, shares([weights[one.name] for one in before.sources]), strict=True)
        mixed = tuple(replace(one, share=share, drawn=drawn[one.name]) for one, share in each)
        self._take_over(replace(before, first_lease=first, sources=mixed))

    def _continued(
        self, sources: Sequence[PromptSource], first: int, *, seed: int, shuffle: bool
    ) -> tuple[PromptSource, ...]:
        if not sources:
            return ()
        drawn: dict[tuple[str, str], int] = {}
        if self._known and (self.latest.seed, self.latest.shuffle) == (seed, shuffle):
            before = self._order.drawn(first)
            drawn = {(one.name, one.digest): before[one.name] for one in self.latest.sources}
        each = zip(sources, shares([one.weight for one in sources]), strict=True)
        return tuple(
            replace(one, share=share, drawn=drawn.get((one.name, one.digest), 0)) for one, share in each
        )

    def source(self, lease_id: int) -> str:
        return self._order.source(lease_id)

    @property
    def drawn(self) -> dict[str, int]:
        """Return how many prompts each source of the latest data set has given, by name."""
        return self._order.drawn(self._ledger.next_id)

    def prompt(self, lease_id: int) -> Prompt:
        found, index = self._order.find(lease_id)
        return with_source(self._prompts[found.digest][index], self.source(lease_id))

    def is_quarantined(self, lease_id: int) -> bool:
        if not self._quarantined:
            return False
        found, index = self._order.find(lease_id)
        return (found.digest, index) in self._quarantined

    def quarantine(self, lease_id: int) -> None:
        """Never issue the prompt of this lease again."""
        found, index = self._order.find(lease_id)
        log.warning("prompt_quarantined", lease_id=lease_id, prompt=index, data_set=found.source)
        self._quarantine(found.digest, index, str(lease_id))

    def skip_long(self, indices: Iterable[int]) -> None:
        """Never issue these prompts of the latest data set, which are too long; others that were are short
        now."""
        digest, left = self.latest.digest, set(indices)
        for name in [name for name, why in self._ledger.facts.items() if why == _TOO_LONG]:
            if name.startswith(f"{_QUARANTINED}{digest}."):
                self._ledger.drop_fact(name)
                self._quarantined.discard((digest, int(name.rpartition(".")[2])))
        for index in left:
            self._quarantine(digest, index, _TOO_LONG)
        if left:
            log.warning("prompts_too_long", count=len(left), of=self.latest.count, first=min(left))

    def refuse_exhausted(self) -> None:
        """Raise `ConfigError` when every prompt is quarantined."""
        if self.latest.next_row is None and self.quarantined == self.latest.count:
            raise ConfigError(
                f"all {self.latest.count} prompts of {self.latest.source} are quarantined, since the actors "
                "that rolled them out died, or too long for the model: look at the actors' logs, or give "
                "other prompts"
            )

    def _take_over(self, data_set: DataSet) -> None:
        if self._known:
            log.info("data_set_takes_over", **asdict(data_set))
        self._known[data_set.first_lease] = data_set
        if data_set.is_picked:
            self._picked[data_set.first_lease] = PickedOrder()
        self._order = DataSetOrder(list(self._known.values()), self._picked)
        self._ledger.set_fact(f"{_DATA_SET}{data_set.first_lease:012d}", json.dumps(asdict(data_set)))

    def _copied(self, prompts: Iterable[Prompt]) -> StoredPrompts:
        if isinstance(prompts, StoredPrompts) and prompts.path.parent == self._directory:
            stored = prompts
        else:
            stored = store_prompts(prompts, self._directory)
        self._prompts[stored.digest] = stored
        return stored

    def _quarantine(self, digest: str, index: int, why: str) -> None:
        self._quarantined.add((digest, index))
        self._ledger.set_fact(f"{_QUARANTINED}{digest}.{index}", why)


class PastPrompts:
    """Prompts of all leases that a run ever issued, for looking back at it."""

    def __init__(self, facts: Mapping[str, str], directory: Path) -> None:
        """Use the ledger's `facts` and the copies in `directory`. Raises `ConfigError` without a data set."""
        known = recorded(facts)
        if not known:
            raise ConfigError(f"the ledger beside {directory} names no data set: it is of an older build")
        self._order = DataSetOrder(known, recorded_picks(facts))
        self._directory = directory
        self._prompts: dict[str, StoredPrompts] = {}

    def of(self, lease_id: int) -> Prompt:
        """Return the prompt of a lease. Raises `StorageError` when the copy of its data set is gone."""
        found, index = self._order.find(lease_id)
        if found.digest not in self._prompts:
            self._prompts[found.digest] = open_stored(
                self._directory, found.digest, source=found.source, save_index=False
            )
        return with_source(self._prompts[found.digest][index], self._order.source(lease_id))


def recorded(facts: Mapping[str, str]) -> list[DataSet]:
    """Return the data sets that the facts of a ledger name, by their first lease."""
    return [
        DataSet.from_json(json.loads(facts[name])) for name in sorted(facts) if name.startswith(_DATA_SET)
    ]


def recorded_picks(facts: Mapping[str, str]) -> dict[int, PickedOrder]:
    """Return the picked orders that the facts of a ledger hold, by the first lease of their data set."""
    found = {known.first_lease: PickedOrder() for known in recorded(facts) if known.is_picked}
    for name in sorted(facts):
        if name.startswith(_PICKED):
            first = int(name.removeprefix(_PICKED).split(".")[0])
            found[first].picked.extend(map(int, facts[name].split()))
    return found
