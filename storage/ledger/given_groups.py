"""The groups that were given to steps: the recent ones in memory, all others by asking the ledger's file."""

import sqlite3
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import takewhile

from bus.errors import StorageError
from storage.ledger.sampling import Candidate

GROUP = ", ".join(f"leases.{field.name}" for field in fields(Candidate))
"""Columns of a group, in the order of its fields."""
_USES = (
    f"SELECT step, weight, {GROUP} FROM uses JOIN leases USING (lease_id) "
    "WHERE step > ? AND step <= ? ORDER BY step, place"
)
_STEPS = "SELECT step FROM uses WHERE lease_id = ? AND step <= ? ORDER BY step"
_USED_OF_VERSIONS = (
    f"SELECT {GROUP} FROM leases WHERE policy_version >= ? AND policy_version < ? AND state IN "
    "('leased', 'committed') AND EXISTS (SELECT 1 FROM uses WHERE uses.lease_id = leases.lease_id "
    "AND step <= ?)"
)
_USED = f"SELECT {GROUP} FROM leases JOIN uses USING (lease_id) WHERE lease_id = ? AND step <= ?"


@dataclass(frozen=True, slots=True)
class Use:
    """A group as one step trains on it."""

    group: Candidate
    weight: float = 1.0
    """The group's importance weight in that step."""

    @property
    def lease_id(self) -> int:
        return self.group.lease_id


class GivenGroups:
    """Which steps each group was given to. `forget` bounds what is in memory, and changes no answer.

    It reads the file under the lock `on_disk`, and expects there only what was flushed: a step is not
    forgotten before."""

    def __init__(
        self,
        sql: sqlite3.Connection,
        on_disk: threading.Lock,
        *,
        newest_step: int,
        samples: int,
        trained: int,
    ) -> None:
        """Know nothing but these counts of what the file holds."""
        self.steps: dict[int, list[Use]] = {}
        """The uses of each step that is in memory, ascending."""
        self.samples = samples
        """Uses of all steps."""
        self.trained = trained
        """Groups that have at least one use."""
        self._sql = sql
        self._on_disk = on_disk
        self._groups: dict[int, dict[int, tuple[Candidate, list[int]]]] = {}
        """Groups in memory and all their steps, by policy version and lease."""
        self._youngest = -1
        self._forgotten = newest_step
        """Steps up to here are in the file alone."""
        self._oldest = sys.maxsize if newest_step else 0
        """All groups with a use are in memory that were issued at this version or later."""
        self._unflushed: set[int] = set()
        """Steps that may not be in the file yet."""

    # --- changes ---

    def give(self, step: int, use: Use) -> None:
        """Add a use to the newest step."""
        version = use.group.policy_version
        self._youngest = max(self._youngest, version)
        _, steps = self._groups.setdefault(version, {}).setdefault(use.lease_id, (use.group, []))
        self.trained += not steps
        steps.append(step)
        self.steps.setdefault(step, []).append(use)
        self.samples += 1
        self._unflushed.add(step)

    def take_back(self, step: int) -> tuple[int, list[Candidate]]:
        """Undo the steps after `step`; return how many uses those were, and the groups without any now."""
        self.recall(step)
        undone = [(s, use) for s in [s for s in self.steps if s > step] for use in self.steps.pop(s)]
        free = [use.group for after, use in undone if self._is_last(after, use)]
        return len(undone), free

    def _is_last(self, step: int, use: Use) -> bool:
        groups = self._groups[use.group.policy_version]
        _, steps = groups[use.lease_id]
        steps.remove(step)
        self.samples -= 1
        if not steps:
            del groups[use.lease_id]
            self.trained -= 1
        return not steps

    def unflushed(self) -> set[int]:
        """Return the steps that the next flush brings to the disk."""
        return set(self._unflushed)

    def flushed(self, steps: set[int]) -> None:
        self._unflushed -= steps

    def forget(self, step: int, *, oldest_version: int) -> None:
        """Drop the steps up to `step` from memory, and their groups that are older than `oldest_version`."""
        durable = min(self._unflushed, default=self.newest_step + 1) - 1
        through = max(self._forgotten, min(step, self.newest_step, durable))
        for old in [s for s in self.steps if s <= through]:
            del self.steps[old]
        self._forgotten = through
        self._oldest = max(self._oldest, oldest_version)
        for version in [v for v in self._groups if v < oldest_version]:
            kept = {n: known for n, known in self._groups[version].items() if known[1][-1] > through}
            self._groups[version] = kept
            if not kept:
                del self._groups[version]

    def recall(self, step: int) -> None:
        """Bring the steps after `step` back into memory."""
        if step >= self._forgotten:
            return
        recalled: dict[int, list[Use]] = {}
        with self._on_disk:
            for number, use in self._read(step, self._forgotten):
                self._remember(use.group)
                recalled.setdefault(number, []).append(use)
        self.steps = recalled | self.steps
        self._forgotten = step

    # --- questions ---

    @property
    def newest_step(self) -> int:
        """Return the latest step that has uses, 0 without any. Steps are given in order, without gaps."""
        return next(reversed(self.steps), self._forgotten)

    def uses(self, step: int) -> list[Use]:
        """Return the uses of a step, none for one that has none."""
        if step in self.steps or step > self._forgotten:
            return self.steps.get(step, [])
        with self._on_disk:
            return [use for _, use in self._read(step - 1, step)]

    def used(self, oldest_version: int) -> Iterator[tuple[Candidate, int]]:
        """Yield the groups issued at `oldest_version` or later that have uses, and how many."""
        if oldest_version < self._oldest:
            with self._on_disk:
                asked = oldest_version, self._oldest, self._forgotten
                for found in self._sql.execute(_USED_OF_VERSIONS, asked).fetchall():
                    self._remember(Candidate(*found))
            self._oldest = oldest_version
        for version in range(oldest_version, self._youngest + 1):
            for group, steps in self._groups.get(version, {}).values():
                yield group, len(steps)

    def used_after(self, step: int) -> set[Candidate]:
        """Return the groups with a use after `step`."""
        self.recall(step)
        later = takewhile(lambda s: s > step, reversed(self.steps))  # steps are leased in order
        return {use.group for s in later for use in self.steps[s]}

    def times(self, group: Candidate, step: int) -> int:
        """Return in how many steps up to `step` a group is that `used` or `used_after` named."""
        return sum(s <= step for s in self._groups[group.policy_version][group.lease_id][1])

    def group(self, lease_id: int) -> Candidate:
        """Return a group that has uses. Raises `StorageError` for a lease without any."""
        versions = range(self._youngest, -1, -1)  # the group is likely to be young
        known = (self._groups[v][lease_id][0] for v in versions if lease_id in self._groups.get(v, ()))
        return next(known, None) or self._recall_group(lease_id)

    def _recall_group(self, lease_id: int) -> Candidate:
        with self._on_disk:
            found = self._sql.execute(_USED, (lease_id, self._forgotten)).fetchone()
            if found is None:
                raise StorageError(f"no step was given lease {lease_id}")
            group = Candidate(*found)
            self._remember(group)
        return group

    def _remember(self, group: Candidate) -> None:
        groups = self._groups.setdefault(group.policy_version, {})
        if group.lease_id not in groups:
            found = self._sql.execute(_STEPS, (group.lease_id, self._forgotten))
            groups[group.lease_id] = group, [step for (step,) in found]
            self._youngest = max(self._youngest, group.policy_version)

    def _read(self, after: int, through: int) -> list[tuple[int, Use]]:
        rows = self._sql.execute(_USES, (after, through)).fetchall()
        return [(step, Use(Candidate(*group), weight)) for step, weight, *group in rows]
