"""Which groups an optimizer step trains on: pure functions over what is stored and what is still out."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from storage.settings.admission import FifoSampler, FreshnessSampler, PrioritySampler, Sampler, UniformSampler

SPREAD_FLOOR = 1e-3
"""Added to a group's mean |advantage|, so that one whose siblings scored alike is rare, not impossible."""
LOWEST_LOG_WEIGHT = -30.0
"""No group is less likely than the likeliest by a larger factor than the exponential of this."""
CERTAIN = 1 - 1e-9
"""A group with this chance or more is taken."""


@dataclass(frozen=True, order=True, slots=True)
class Candidate:
    """A group that a step may be given. Candidates are ordered oldest first."""

    policy_version: int
    """The learner's version when its lease was issued: no token of it is older."""
    lease_id: int
    spread: float = field(default=0.0, compare=False)
    """Mean |advantage| of the group before any normalisation; 0 where the sampler does not use it."""
    tokens: int = field(default=0, compare=False)
    """Tokens of all trajectories of the group, once it is stored."""
    computed_tokens: int = field(default=0, compare=False)
    """Tokens of those that are trained, of which what several begin with counts once; 0 where the learner
    does not share it. With it, `tokens` are those of what is trained."""
    images: int = field(default=0, compare=False)
    """Different images that its trained trajectories show, where the learner's balance is by work."""
    image_tokens: int = field(default=0, compare=False)
    """Tokens that stand for these images, for each image once."""


@dataclass(frozen=True)
class Choice:
    """The groups of one step and their importance weights, or why there are none yet."""

    leases: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    """A weight for each lease; empty when all are 1."""
    waiting_for: str = ""
    blockers: tuple[int, ...] = ()
    """The groups rolling out without which the step goes no further."""


@dataclass(frozen=True)
class Index:
    """N complete groups that a step may be given, oldest first."""

    lease_ids: NDArray[np.int64]
    versions: NDArray[np.int64]
    spreads: NDArray[np.float64]
    uses: NDArray[np.int64]
    """How many steps have each already."""

    @classmethod
    def of(cls, groups: Iterable[tuple[Candidate, int]]) -> Self:
        """Return the index of these groups and their uses."""
        rows = sorted(groups)
        return cls(
            lease_ids=np.array([group.lease_id for group, _ in rows], np.int64),
            versions=np.array([group.policy_version for group, _ in rows], np.int64),
            spreads=np.array([group.spread for group, _ in rows], np.float64),
            uses=np.array([uses for _, uses in rows], np.int64),
        )

    def __len__(self) -> int:
        return len(self.lease_ids)

    def where(self, keep: NDArray[np.bool_]) -> "Index":
        return Index(self.lease_ids[keep], self.versions[keep], self.spreads[keep], self.uses[keep])


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """A step's request for groups."""

    groups: int
    train_version: int
    """The learner's version when it will train on them."""
    max_staleness: int
    """Versions a token may lag."""
    step: int = 1
    seed: int = 0
    """Seed of the random strategies, together with `step`."""
    exact_staleness: bool = False
    """Whether groups are trained on as late as the bound allows; nothing rolls out then."""


def choose(
    sampler: Sampler, stored: Collection[Candidate], used: Iterable[tuple[Candidate, int]],
    rolling_out: Iterable[Candidate], question: StepRequest,
) -> Choice:  # fmt: skip
    """Return the groups of a step by the configured strategy.

    Args:
        sampler: the strategy.
        stored: complete groups that no step has, none of them expired.
        used: complete groups that steps have, and how many do; of any age.
        rolling_out: issued groups that are not complete.
        question: what the step needs."""
    oldest = question.train_version - question.max_staleness
    again = [(g, n) for g, n in used if n < sampler.max_reuse and g.policy_version >= oldest]
    if isinstance(sampler, FifoSampler):
        if question.exact_staleness:
            return least_laxity_first(stored, again, question, reuse=sampler.max_reuse)
        ordered = [group for group, _ in sorted(again, key=lambda entry: (entry[1], entry[0]))]
        return oldest_first(stored, rolling_out, question, again=ordered)
    index = Index.of([*((group, 0) for group in stored), *again])
    return at_random(sampler, index, rolling_out, question)


def oldest_first(
    stored: Iterable[Candidate], rolling_out: Iterable[Candidate], question: StepRequest, *,
    again: Sequence[Candidate] = (),
) -> Choice:  # fmt: skip
    """Return the oldest stored groups, if everything left behind can still be trained within the staleness
    bound.

    A group issued at version u has its deadline at u + max_staleness. Taking younger groups past one that is
    still rolling out is fine until the steps left before its deadline no longer hold all that are due by
    then; from there the step waits for it (earliest deadline first, Liu & Layland 1973). It never waits for
    one that waiting cannot save. Groups to train on once more, `again`, only fill a step that has too few."""
    groups, version, staleness = question.groups, question.train_version, question.max_staleness
    ready = sorted(stored)
    out = [c for c in rolling_out if c.policy_version + staleness >= version]
    missing = groups - len(ready) - len(again)
    if missing > 0:
        return _too_few(len(ready) + len(again), groups, out)
    left = sorted([*ready[groups:], *out])
    trained_at = _schedule(left, version + 1, groups)
    if_we_wait = _schedule(sorted([*ready, *out]), version, groups)
    for straggler in left:
        if if_we_wait[straggler] <= straggler.policy_version + staleness < trained_at[straggler]:
            due = [c for c in out if c.policy_version + staleness == version]
            return _wait_for(straggler, staleness, blockers=due or [straggler])
    return Choice(leases=tuple(c.lease_id for c in [*ready, *again][:groups]))


def least_laxity_first(
    stored: Iterable[Candidate], again: Iterable[tuple[Candidate, int]], question: StepRequest, *, reuse: int
) -> Choice:
    """Return the groups that can least wait, if each is to have all its uses within the staleness bound.

    A group is used once a step. Its laxity is the number of steps up to its deadline less that of its uses
    still to come. So groups begin `reuse` steps before the bound and are used in each step from then on."""
    uses = [*((group, 0) for group in stored), *again]
    if len(uses) < question.groups:
        return _too_few(len(uses), question.groups, [])

    def laxity(entry: tuple[Candidate, int]) -> tuple[int, Candidate]:
        group, used = entry
        steps = group.policy_version + question.max_staleness + 1 - question.train_version
        return steps - (reuse - used), group

    return Choice(leases=tuple(group.lease_id for group, _ in sorted(uses, key=laxity)[: question.groups]))


def at_random(
    sampler: UniformSampler | FreshnessSampler | PrioritySampler, index: Index,
    rolling_out: Iterable[Candidate], question: StepRequest,
) -> Choice:  # fmt: skip
    """Return different groups drawn by their weights, once every group at its deadline had its chance to be
    there."""
    staleness = question.max_staleness
    out = [c for c in rolling_out if c.policy_version + staleness >= question.train_version]
    due = [c for c in out if c.policy_version + staleness == question.train_version]
    if len(index) < question.groups:
        return _too_few(len(index), question.groups, out)
    if due:
        return _wait_for(min(due), staleness, blockers=due)
    weights = strategy_weights(sampler, index, question.train_version)
    chances = inclusion_chances(weights, question.groups)
    chosen = draw(chances, seed=question.seed, step=question.step)
    exponent = 0.0 if isinstance(sampler, UniformSampler) else sampler.importance_exponent
    corrections = importance_weights(chances, exponent)[chosen] if exponent else np.empty(0)
    return Choice(leases=tuple(index.lease_ids[chosen].tolist()), weights=tuple(corrections.tolist()))


def strategy_weights(
    sampler: UniformSampler | FreshnessSampler | PrioritySampler, index: Index, train_version: int
) -> NDArray[np.float64]:
    """Return what each group's chance of being drawn is proportional to, [N]; the largest is 1."""
    logs = np.zeros(len(index))
    if not isinstance(sampler, UniformSampler):
        lag = np.maximum(0, train_version - index.versions)  # a dead learner's groups may be ahead of ours
        preference = sampler.exponent if isinstance(sampler, FreshnessSampler) else sampler.freshness_exponent
        logs -= preference * np.log1p(lag)
    if isinstance(sampler, PrioritySampler):
        logs += sampler.advantage_exponent * np.log(index.spreads + SPREAD_FLOOR)
    return np.asarray(np.exp(np.maximum(logs - logs.max(), LOWEST_LOG_WEIGHT)), np.float64)


def inclusion_chances(weights: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the chance of each of N groups to be among the `count` different ones of a step, [N].

    Chances are proportional to the weights and add up to `count`. Where that would be more than 1, the group
    is certain, and the others share what is left (Hájek 1981)."""
    chances = np.zeros(len(weights))
    while True:
        others = chances < 1.0
        left = count - int(np.count_nonzero(~others))
        chances[others] = left * weights[others] / weights[others].sum()
        certain = others & (chances >= CERTAIN)
        if not certain.any():
            return chances
        chances[certain] = 1.0


def draw(chances: NDArray[np.float64], *, seed: int, step: int) -> NDArray[np.int64]:
    """Return the positions of different groups, each of which is drawn with its chance exactly, ascending.

    The chances add up to the number of groups. The draw is systematic in a random order (Madow 1949): the
    chances are laid end to end, and marks one apart, the first at random below 1, each draw the group they
    fall on. numpy keeps raw bits the same across its versions."""
    bits = np.random.PCG64([seed, step]).random_raw(len(chances) + 1)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
    return systematic(chances, np.argsort(uniform[:-1], kind="stable"), float(uniform[-1]))


def systematic(chances: NDArray[np.float64], order: NDArray[np.intp], first_mark: float) -> NDArray[np.int64]:
    """Return the positions that marks at `first_mark`, `first_mark` + 1 and so on fall on, ascending.

    Args:
        chances: [N] in (0, 1], whose sum is a whole number.
        order: [N], the positions in the order in which their chances are laid end to end.
        first_mark: between 0 and 1."""
    certain = np.flatnonzero(chances == 1.0).astype(np.int64)
    order = order[chances[order] < 1.0]
    ends = np.cumsum(chances[order])
    marks = first_mark + np.arange(round(float(chances[order].sum())))
    if not len(marks):
        return certain
    ends *= len(marks) / ends[-1]
    ends[-1] = np.inf  # no mark lies behind the last group, whatever was rounded
    return np.sort(np.concatenate((certain, order[np.searchsorted(ends, marks)]))).astype(np.int64)


def importance_weights(chances: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """Return the weight of each of N groups if it is drawn, [N]: in proportion to its chance^-exponent.

    The expected sum of a step's weights is the number of its groups. So with an exponent of 1 the weight is
    (mean chance) / chance, and the expected weighted loss of a step is the mean loss of all N groups
    (Horvitz & Thompson 1952); with an exponent of 0 each weight is 1."""
    corrections = np.where(chances > 0, chances, 1.0) ** -exponent
    return np.asarray(corrections * (chances.sum() / (chances * corrections).sum()), np.float64)


def expired(stored: Iterable[Candidate], *, train_version: int, max_staleness: int) -> list[int]:
    """Return the leases past the bound at `train_version`. Oldest first, only a changed bound or batch size
    brings that about; a random strategy passes some by."""
    return sorted(c.lease_id for c in stored if c.policy_version + max_staleness < train_version)


def room(*, owed: float, groups: int, max_staleness: float, samples_each: float) -> int:
    """Return the number of groups that may be issued so that the steps within the bound can give each the
    samples it is owed.

    With `samples_each` 1 this is AReaL's capacity rule (arXiv:2505.24298, eq. 3)."""
    return max(0, math.floor(((max_staleness + 1) * groups - owed) / samples_each + 1e-9))


def lacking(*, samples: int, inserted: int, groups: int, at_most: float) -> int:
    """Return the number of groups yet to be stored before the next step keeps to `at_most` samples a group on
    average."""
    return max(0, math.ceil((samples + groups) / at_most - 1e-9) - inserted)


def _too_few(ready: int, groups: int, out: list[Candidate]) -> Choice:
    first = sorted(out)[: groups - ready]
    return Choice(
        waiting_for=f"{ready} of {groups} groups are stored, {len(out)} rolling out",
        blockers=tuple(c.lease_id for c in first),
    )


def _wait_for(straggler: Candidate, max_staleness: int, *, blockers: Sequence[Candidate]) -> Choice:
    return Choice(
        waiting_for=f"group {straggler.lease_id}, rolling out since version "
        f"{straggler.policy_version}, must be trained by version {straggler.policy_version + max_staleness}",
        blockers=tuple(c.lease_id for c in blockers),
    )


def _schedule(candidates: Iterable[Candidate], first_version: int, groups: int) -> dict[Candidate, int]:
    """Return the version at which each is trained if they are taken in this order, `groups` a step."""
    return {candidate: first_version + n // groups for n, candidate in enumerate(candidates)}
