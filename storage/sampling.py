"""Which groups an optimizer step trains on: pure functions over what is stored and what is still out."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
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
    then; from there the step waits for it (earliest deadline first, Liu & Layland 1973). It never waits for
    one that waiting cannot save.

    Args:
        stored: complete groups nobody trains on yet, none of them expired.
        rolling_out: issued groups that are not complete.
        groups: how many a step takes.
        train_version: the learner's version when it will train on them.
        max_staleness: versions a token may lag.
    """
    ready = sorted(stored)
    out = [c for c in rolling_out if c.policy_version + max_staleness >= train_version]
    if len(ready) < groups:
        return Choice(waiting_for=f"{len(ready)} of {groups} groups are stored, {len(out)} rolling out")
    left = sorted([*ready[groups:], *out])
    trained_at = _schedule(left, train_version + 1, groups)
    if_we_wait = _schedule(sorted([*ready, *out]), train_version, groups)
    for straggler in left:
        deadline = straggler.policy_version + max_staleness
        if if_we_wait[straggler] <= deadline < trained_at[straggler]:
            return Choice(
                waiting_for=f"group {straggler.lease_id}, rolling out since version "
                f"{straggler.policy_version}, must be trained by version {deadline}"
            )
    return Choice(leases=tuple(c.lease_id for c in ready[:groups]))


def expired(stored: Iterable[Candidate], *, train_version: int, max_staleness: int) -> list[int]:
    """Leases past the bound at `train_version`: only a changed bound or batch size brings that about."""
    return sorted(c.lease_id for c in stored if c.policy_version + max_staleness < train_version)


def _schedule(candidates: Iterable[Candidate], first_version: int, groups: int) -> dict[Candidate, int]:
    """The version at which each is trained if they are taken in this order, `groups` a step."""
    return {candidate: first_version + n // groups for n, candidate in enumerate(candidates)}
