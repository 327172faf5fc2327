"""Which groups an optimizer step trains on: pure functions over what is stored and what is still out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Candidate:
    """A group that is not yet given to a step. Ordered oldest first."""

    policy_version: int
    """The learner's version when its lease was issued: no token of it is older."""
    lease_id: int


@dataclass(frozen=True)
class Choice:
    """The groups of one step, or why there are none yet."""

    leases: tuple[int, ...] = ()
    waiting_for: str = ""


def oldest_first(
    stored: Iterable[Candidate], rolling_out: Iterable[Candidate], *,
    groups: int, train_version: int, max_staleness: int,
) -> Choice:  # fmt: skip
    """The oldest stored groups, if everything left behind can still be trained within the staleness bound.

    A group issued at version u has its deadline at u + max_staleness. Taking younger groups past one that is
    still rolling out is fine until the steps left before its deadline no longer hold all that are due by
    then; from there the step waits for it (earliest deadline first, Liu & Layland 1973).

    Args:
        stored: complete groups nobody trains on yet.
        rolling_out: issued groups that are not complete.
        groups: how many a step takes.
        train_version: the learner's version when it will train on them.
        max_staleness: versions a token may lag.
    """
    ready = sorted(stored)
    out = sorted(rolling_out)
    if len(ready) < groups:
        return Choice(waiting_for=f"{len(ready)} of {groups} groups are stored, {len(out)} rolling out")
    left = sorted([*ready[groups:], *out])
    late = _first_late(left, groups=groups, next_version=train_version + 1, max_staleness=max_staleness)
    if late is not None and late in out:
        deadline = late.policy_version + max_staleness
        return Choice(
            waiting_for=f"group {late.lease_id}, rolling out since version {late.policy_version}, "
            f"must be trained by version {deadline}"
        )
    return Choice(leases=tuple(c.lease_id for c in ready[:groups]))


def expired(stored: Iterable[Candidate], *, train_version: int, max_staleness: int) -> list[int]:
    """Leases whose groups are past the bound at `train_version`: only a changed bound or a rollback does that."""
    return sorted(c.lease_id for c in stored if c.policy_version + max_staleness < train_version)


def _first_late(
    left: Sequence[Candidate], *, groups: int, next_version: int, max_staleness: int
) -> Candidate | None:
    """The oldest candidate that would miss its deadline if `left` were trained in order from `next_version`."""
    for n, candidate in enumerate(left):
        if candidate.policy_version + max_staleness < next_version + n // groups:
            return candidate
    return None
