"""Data sets of a run: the leases that each is for, a copy of each, and quarantined prompts."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import structlog
import xxhash

from bus.codec import encode
from bus.errors import ConfigError, LostDataError, StorageError
from bus.messages import Prompt
from storage.config import PromptKeys
from storage.dispatch.ledger import Ledger
from storage.prompts.dataset import DataSet, DataSetOrder, load_prompts, save_prompts

log = structlog.get_logger()
_DATA_SET, _QUARANTINED, _CONFIGURED = "data_set.", "quarantined.", "data_configured"
"""Prefixes of the names of the ledger's facts that belong here."""


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Return a digest of these prompts in this order."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(encode(prompt))
    return digest.hexdigest()


class DataSets:
    """Data sets as the ledger records them. A change is durable once the ledger is flushed.

    Every data set is copied into `directory` before it is used, so that an open lease keeps its prompt
    whatever happens to the file.
    """

    def __init__(self, ledger: Ledger, directory: Path) -> None:
        self._ledger = ledger
        self._directory = directory
        self._prompts: dict[str, Sequence[Prompt]] = {}
        self._known = {found.first_lease: found for found in recorded(ledger.facts)}
        """Data sets by their first lease, in that order."""
        self._quarantined: set[tuple[str, int]] = set()
        for name in ledger.facts:
            if name.startswith(_QUARANTINED):
                _, digest, index = name.split(".")
                self._quarantined.add((digest, int(index)))
        self._order = DataSetOrder(list(self._known.values()))

    @property
    def latest(self) -> DataSet:
        """Data set that leases are issued for now."""
        return next(reversed(self._known.values()))

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Return the prompts of the latest data set."""
        return self._prompts[self.latest.digest]

    @property
    def quarantined(self) -> int:
        """Return the number of quarantined prompts in the latest data set."""
        return sum(digest == self.latest.digest for digest, _ in self._quarantined)

    def configure(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, source: str) -> None:
        """Start with the configuration's data set, or the ledger's latest if that has not changed.

        Reads the copies that open leases need, which blocks. Raises `StorageError` when one is gone.
        """
        digest = digest_of(prompts)
        self._copy(digest, prompts)
        configured = json.dumps([digest, seed, shuffle])
        if self._ledger.facts.get(_CONFIGURED) != configured:
            # a ledger from before data sets were noted knows only one
            first = self._ledger.next_id if self._known else 0
            self._take_over(DataSet(first, digest, len(prompts), seed, shuffle, source))
            self._ledger.set_fact(_CONFIGURED, configured)
        for known in {self.latest, *(self._order.find(n)[0] for n in self._ledger.rolling_out)}:
            if known.digest not in self._prompts:
                self._prompts[known.digest] = _read_copy(self._directory, known)

    async def add(self, prompts: Sequence[Prompt], *, keep_old: bool, source: str) -> DataSet:
        """Use `prompts` from the next lease on, after those of the latest data set if `keep_old`.

        Adding the same prompts twice in a row changes nothing. One call at a time. Raises `StorageError`.
        """
        before = self.latest
        added = ("+" if keep_old else "") + await asyncio.to_thread(digest_of, prompts)
        if before.added == added:
            return before
        everything = [*self.prompts, *prompts] if keep_old else prompts
        digest = await asyncio.to_thread(digest_of, everything)
        await asyncio.to_thread(self._copy, digest, everything)
        if keep_old:
            for _, index in [entry for entry in self._quarantined if entry[0] == before.digest]:
                self._quarantine(digest, index, "as before")
        self._take_over(
            replace(
                before,
                first_lease=self._ledger.next_id,
                digest=digest,
                count=len(everything),
                source=f"{before.source} and {source}" if keep_old else source,
                added=added,
            )
        )
        return self.latest

    def prompt(self, lease_id: int) -> Prompt:
        """Return the prompt of an open lease."""
        found, index = self._order.find(lease_id)
        return self._prompts[found.digest][index]

    def is_quarantined(self, lease_id: int) -> bool:
        """Return whether the prompt of a lease is quarantined."""
        if not self._quarantined:
            return False
        found, index = self._order.find(lease_id)
        return (found.digest, index) in self._quarantined

    def quarantine(self, lease_id: int) -> None:
        """Never issue the prompt of this lease again."""
        found, index = self._order.find(lease_id)
        log.warning("prompt_quarantined", lease_id=lease_id, prompt=index, data_set=found.source)
        self._quarantine(found.digest, index, str(lease_id))

    def refuse_exhausted(self) -> None:
        """Raise `ConfigError` when every prompt is quarantined."""
        if self.quarantined == self.latest.count:
            raise ConfigError(
                f"all {self.latest.count} prompts of {self.latest.source} are quarantined, since the actors "
                "that rolled them out died: look at the actors' logs, or give other prompts"
            )

    def _take_over(self, data_set: DataSet) -> None:
        if self._known:
            log.info("data_set_takes_over", **asdict(data_set))
        self._known[data_set.first_lease] = data_set
        self._order = DataSetOrder(list(self._known.values()))
        self._ledger.set_fact(f"{_DATA_SET}{data_set.first_lease:012d}", json.dumps(asdict(data_set)))

    def _copy(self, digest: str, prompts: Sequence[Prompt]) -> None:
        path = _copy_path(self._directory, digest)
        try:
            if not path.exists():
                save_prompts(path, prompts)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error}") from error
        self._prompts[digest] = prompts

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
        self._order = DataSetOrder(known)
        self._directory = directory
        self._prompts: dict[str, Sequence[Prompt]] = {}

    def of(self, lease_id: int) -> Prompt:
        """Return the prompt of a lease. Raises `StorageError` when the copy of its data set is gone."""
        found, index = self._order.find(lease_id)
        if found.digest not in self._prompts:
            self._prompts[found.digest] = _read_copy(self._directory, found)
        return self._prompts[found.digest][index]


def recorded(facts: Mapping[str, str]) -> list[DataSet]:
    """Return the data sets that the facts of a ledger name, by their first lease."""
    return [DataSet(**json.loads(facts[name])) for name in sorted(facts) if name.startswith(_DATA_SET)]


def _copy_path(directory: Path, digest: str) -> Path:
    return directory / f"prompts-{digest}.jsonl"


def _read_copy(directory: Path, known: DataSet) -> Sequence[Prompt]:
    path = _copy_path(directory, known.digest)
    try:
        found = load_prompts(path, PromptKeys())
    except ConfigError as error:
        raise StorageError(f"the copy of {known.source} cannot be read ({error}): restore it") from error
    if digest_of(found) != known.digest:
        raise LostDataError(f"{path} is not the copy of {known.source} that it was: restore it")
    return found
