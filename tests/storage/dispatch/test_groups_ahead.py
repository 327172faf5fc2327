"""Groups are issued as the learner needs them: by hand, and in a simulated run on the ledger."""

import heapq
import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import fmean

import pytest
from pydantic import ValidationError
from scipy.stats import kstest, lognorm

from bus.requests import StoredGroups
from storage.dispatch.admission import STEPS, Admission, GroupsAhead
from storage.ledger.ledger import Ledger, prepare
from storage.settings.admission import AdmissionConfig, FifoSampler, UniformSampler
from tests.storage.serving import manifest

GROUPS = 16
SPREAD = 1.0
"""Standard deviation of the logarithm of a rollout's length."""


def test_fewer_are_issued_while_some_are_left_over_and_more_when_a_step_lacks_some():
    ahead = GroupsAhead(AdmissionConfig(groups_per_step=10, max_staleness=4, ahead="need"))
    for _ in range(STEPS):
        assert ahead.groups == 40  # all that the bound allows
        ahead.step_done(30)
    assert ahead.groups == 11  # one group is kept besides those of the next step
    for _ in range(5 + STEPS):  # the first train on what was issued before
        ahead.step_done(1)
    assert ahead.groups == 11
    ahead.step_done(-4)
    assert ahead.groups == 15
    for _ in range(3 + 2 * STEPS - 1):  # it is looked at for longer now
        ahead.step_done(5)
        assert ahead.groups == 15
    ahead.step_done(5)
    assert ahead.groups == 11
    for _ in range(9):
        ahead.step_done(-10)
    assert ahead.groups == 40


def test_what_is_complete_beyond_the_next_step_is_kept_by_its_spread():
    ahead = GroupsAhead(AdmissionConfig(groups_per_step=10, max_staleness=4, ahead="need"))
    for n in range(STEPS):
        ahead.step_done(20 + 4 * (n % 2))  # a standard deviation of 2
    assert ahead.groups == 40 - (20 - 4)


def test_all_that_the_bound_allows_is_issued_where_that_is_asked_for():
    ahead = GroupsAhead(AdmissionConfig(groups_per_step=10, max_staleness=4))
    for _ in range(STEPS):
        ahead.step_done(30)
    assert ahead.groups == 40


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"exact_staleness": True}, "exact_staleness=True"),
        ({"sampler": UniformSampler()}, "sampler.type=uniform"),
        ({"sampler": FifoSampler(max_reuse=2)}, "sampler.max_reuse=2"),
        ({"sampler": FifoSampler(min_samples_per_insert=0.5)}, "sampler.min_samples_per_insert=0.5"),
    ],
)
def test_settings_with_which_the_need_is_not_known_are_refused(changes, named):
    with pytest.raises(
        ValidationError, match=f"admission.ahead=need with admission.{named}: .* set that, or"
    ):
        AdmissionConfig(ahead="need", **changes)
    AdmissionConfig(**changes)


def test_a_version_that_is_announced_again_in_mid_step_is_no_step():
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        config = AdmissionConfig(groups_per_step=1, max_staleness=4, ahead="need")
        admission = Admission(Ledger(connection), config, seed=0)
        admission.opened = True
        admission.resume(0, "a")
        admission.on_policy(manifest(0))
        leases = tuple(admission.issue())
        admission.on_stored(StoredGroups(shard=0, after=0, lease_ids=leases, total=len(leases)))
        for version in range(1, STEPS):
            assert admission.on_policy(manifest(version))
            assert admission.on_policy(replace(manifest(version), snapshot_version=0))
        assert admission.ahead.groups == 4
        admission.on_policy(manifest(STEPS))
        assert admission.ahead.groups == 1


@dataclass
class SimulatedRun:
    """A learner whose steps take 1 s, and actors with slots for 64 groups, on a clock of their own."""

    admission: Admission
    median_s: float
    """Of a rollout."""
    chance: random.Random
    now: float = 0.0
    queue: list[int] = field(default_factory=list)
    running: list[tuple[float, int]] = field(default_factory=list)
    sampled_at: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, float] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    idle_s: float = 0.0

    def issue(self, version: int) -> None:
        self.queue += self.admission.issue()
        while self.queue and len(self.running) < 64:
            lease = self.queue.pop(0)
            self.sampled_at[lease] = version
            self.lengths[lease] = self.median_s * self.chance.lognormvariate(0, SPREAD)
            heapq.heappush(self.running, (self.now + self.lengths[lease], lease))

    def generate(self, until: float, version: int) -> None:
        while self.running and self.running[0][0] <= until:
            self.now, lease = heapq.heappop(self.running)
            after = self.admission.seen(0)
            self.admission.on_stored(StoredGroups(shard=0, after=after, lease_ids=(lease,), total=after + 1))
            self.issue(version)
        self.now = max(self.now, until)

    def train(self, steps: int) -> None:
        for step in range(1, steps + 1):
            self.admission.on_policy(manifest(step - 1))
            self.issue(step - 1)
            began = self.now
            while isinstance(batch := self.admission.batch(step, step - 1, now_s=self.now), str):
                self.generate(self.running[0][0], step - 1)
            self.idle_s += (self.now - began) * (step > 1)
            leases = [use.lease_id for use in batch]
            self.trained += leases
            self.staleness += [step - 1 - self.sampled_at[lease] for lease in leases]
            ends = self.now + 1.0
            self.generate(ends - 0.5, step - 1)
            self.admission.batch(step + 1, step, now_s=self.now)  # asked for while the step is trained
            self.generate(ends, step - 1)


def simulated(ahead: str, *, median_s: float, seed: int, steps: int = 150) -> SimulatedRun:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        config = AdmissionConfig(groups_per_step=GROUPS, max_staleness=4, ahead=ahead)
        admission = Admission(Ledger(connection), config, seed=seed)
        admission.opened = True
        admission.resume(0, "a")
        run = SimulatedRun(admission, median_s, random.Random(seed))
        run.train(steps)
    return run


@pytest.mark.parametrize(
    ("median_s", "fresh", "seeds"), [(0.05, 1.3, 1), pytest.param(0.3, 2.2, 3, marks=pytest.mark.slow)]
)
def test_staleness_falls_to_what_generation_takes_and_the_learner_waits_no_longer(median_s, fresh, seeds):
    bound, need = (
        [simulated(ahead, median_s=median_s, seed=seed) for seed in range(seeds)]
        for ahead in ("bound", "need")
    )
    late = 30 * GROUPS  # the first steps train on what was issued before anything was known
    assert fmean(fmean(run.staleness[late:]) for run in bound) > 3.9
    assert fmean(fmean(run.staleness[late:]) for run in need) < fresh
    idle = {name: fmean(run.idle_s / run.now for run in runs) for name, runs in (("b", bound), ("n", need))}
    assert idle["n"] <= idle["b"] + 0.02
    for run in need:  # long rollouts are trained on as often as short ones
        lengths = [run.lengths[lease] for lease in run.trained]
        assert kstest(lengths, lognorm(SPREAD, scale=median_s).cdf).pvalue > 0.01
