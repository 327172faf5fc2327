"""Groups are issued as the learner needs them: by hand, and in a simulated run on the ledger."""

import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from statistics import fmean

import pytest
from pydantic import ValidationError
from scipy.stats import ks_2samp

from benchmarks.admission import TAILS, Load, simulated
from bus.requests import StoredGroups
from storage.dispatch.admission import STEPS, Admission, GroupsAhead
from storage.ledger.ledger import Ledger, prepare
from storage.settings.admission import AdmissionConfig, FifoSampler, UniformSampler
from tests.storage.serving import manifest


def test_fewer_are_issued_while_some_are_left_over_and_more_when_a_step_lacks_some():
    ahead = GroupsAhead(AdmissionConfig(groups_per_step=10, max_staleness=4, ahead="need"))
    for _ in range(STEPS):
        assert ahead.groups == 20  # two steps at first
        ahead.step_done(10)
    assert ahead.groups == 10
    for _ in range(3 + STEPS):  # the first train on what was issued before
        ahead.step_done(0)
    assert ahead.groups == 10
    ahead.step_done(-4)
    assert ahead.groups == 14
    for _ in range(3 + 2 * STEPS - 1):  # it is looked at for longer now
        ahead.step_done(4)
        assert ahead.groups == 14
    ahead.step_done(4)
    assert ahead.groups == 10
    for _ in range(9):
        ahead.step_done(-10)
    assert ahead.groups == 40


def test_steps_lack_a_hundredth_of_their_groups_so_that_data_is_fresher():
    ahead = GroupsAhead(AdmissionConfig(groups_per_step=100, max_staleness=4, ahead="need"))
    for left_over in (20, 25, *[90] * (STEPS - 2)):
        ahead.step_done(left_over)
    assert ahead.groups == 200 - 26  # 6 groups and 1 of the 800


def test_groups_that_wait_for_an_actor_are_spare_where_no_step_lacks_them():
    ahead = GroupsAhead(AdmissionConfig(groups_per_step=10, max_staleness=4, ahead="need"))
    for _ in range(STEPS):
        assert ahead.groups == 20
        ahead.step_done(-10, waiting=15)
    assert ahead.groups == 15
    ahead.step_done(-10, waiting=1)
    assert ahead.groups == 24


@pytest.mark.parametrize("ratio", [1.0, 1.2])
def test_prompts_that_engines_read_do_not_pass_for_groups_that_wait(ratio: float):
    """On an H200 three groups of a step of 32 were always without a token: the learner waited for 0.15 of its
    time beside slots that were idle for 0.24 of theirs."""
    found = simulated(Load(tail="h200", ratio=ratio, max_staleness=12, reading=3)).figures()
    assert found["learner_idle"] <= 0.02
    assert found["slots_idle"] <= 1 - 1 / ratio + 0.02


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
        assert admission.ahead.groups == 2
        admission.on_policy(manifest(STEPS))
        assert admission.ahead.groups == 0


SMALL = Load(groups=16, samples=2, slots=32, max_staleness=12, steps=120)
"""Rollouts take up to 8 steps, and the bound has room for them."""


def test_data_is_as_old_as_generation_takes_and_the_learner_does_not_wait():
    found = simulated(replace(SMALL, ratio=2.0)).figures()
    assert found["staleness_mean"] < 2.5  # all that the bound allows would make it 12
    assert found["learner_idle"] < 0.02


def test_data_is_fresh_from_the_first_steps_on_and_the_learner_does_not_wait_for_that():
    run = simulated(Load(ratio=2.0, max_staleness=12, steps=30))
    assert fmean(map(fmean, run.staleness)) < 2.5
    assert sum(run.idle_s[1:]) < 0.02 * (run.now - run.began_s[1])


def test_no_more_is_issued_than_fills_the_actors_where_generation_is_the_slower_side():
    found = simulated(replace(SMALL, ratio=0.5)).figures()
    assert found["staleness_mean"] < 3
    assert found["slots_idle"] < 0.02
    assert found["step_s"] < 2.1


@pytest.mark.parametrize("tail", ["lognormal", "pareto", "bimodal"])
def test_long_rollouts_are_trained_on_as_often_as_short_ones(tail):
    run = simulated(replace(SMALL, tail=tail, ratio=1.2))
    trained = sorted(lease for step in run.trained for lease in step)
    whole = trained[: -13 * SMALL.groups]
    assert whole == list(range(len(whole)))  # only younger ones were overtaken
    lengths = [length for lease in whole for length in run.lengths[lease]]
    chance = random.Random(1)
    drawn = [run.scale_s * TAILS[tail](chance) for _ in range(20_000)]
    assert ks_2samp(lengths, drawn).pvalue > 0.01
