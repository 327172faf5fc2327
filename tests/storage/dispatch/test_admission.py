"""What is issued and what a step gets, decided on the ledger alone: in any order of events, at any speed."""

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from multiprocessing import get_context

import pytest
from pydantic import ValidationError

from bus.errors import FencedError
from bus.messages import GroupRejected
from bus.requests import StoredGroups
from storage.dispatch.admission import Admission
from storage.ledger.ledger import Ledger, prepare
from storage.settings.admission import AdmissionConfig, FifoSampler, FreshnessSampler, UniformSampler
from tests.storage.dispatch.admitting_run import Run
from tests.storage.dispatch.interleavings import play_many
from tests.storage.serving import manifest

# --- random interleavings ---


def test_any_order_of_events_keeps_the_bound_loses_nothing_and_goes_on():
    """See `World.check`, `World.check_batch` and `World.settle` for what is asserted."""
    assert play_many(range(300), events=25) > 300
    assert play_many(range(60), events=70) > 60
    assert play_many(range(2900, 2950), events=60) > 100  # some resume with larger batches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "orders"), [(0, 1_000), pytest.param(1_000, 100_000, marks=pytest.mark.nightly)]
)
def test_thousands_of_orders_of_events_keep_the_bound_lose_nothing_and_go_on(first: int, orders: int):
    parts = [range(n, n + 500) for n in range(first, first + orders, 500)]
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as pool:
        assert sum(pool.map(partial(play_many, events=20), parts)) > orders


# --- by hand ---


@pytest.fixture
def sql() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)) as connection:
        prepare(connection)
        yield connection


def config(groups: int = 2, staleness: int = 1, **changes: object) -> AdmissionConfig:
    return AdmissionConfig(groups_per_step=groups, max_staleness=staleness, **changes)


def test_group_that_never_completes_is_dropped_when_patience_ends(sql):
    run = Run(sql, config(incomplete="drop", patience_s=10))
    run.store(1, 2, 3)
    assert run.batch(1) == [1, 2]
    assert run.publish(1) == [4, 5]
    run.store(4, 5)
    waiting = "group 0, rolling out since version 0, must be trained by version 1"
    assert run.batch(2, now_s=100.0) == waiting
    assert run.batch(2, now_s=109.9) == waiting
    assert run.batch(2, now_s=110.0) == [3, 4]
    assert run.ledger.reasons == {"incomplete": 1}
    assert run.admission.issue() == [6]  # its refund
    run.admission.on_rejected([GroupRejected(lease_id=0, reason="rollout_failed")])
    run.store(0)  # both too late
    assert run.ledger.reasons == {"incomplete": 1}
    assert run.ledger.account().balanced()


def test_patience_begins_anew_when_a_group_completes(sql):
    run = Run(sql, config(incomplete="drop", patience_s=10, staleness=0, groups=3))
    run.store(0)
    assert run.batch(1, now_s=0.0) == "1 of 3 groups are stored, 2 rolling out"
    run.store(1)
    assert run.batch(1, now_s=11.0) == "2 of 3 groups are stored, 1 rolling out"
    assert run.batch(1, now_s=20.9) == "2 of 3 groups are stored, 1 rolling out"
    assert run.batch(1, now_s=21.0) == "2 of 3 groups are stored, 0 rolling out"
    assert run.admission.issue() == [3]
    run.store(3)
    assert run.batch(1) == [0, 1, 3]


def test_only_as_many_as_are_missing_are_dropped_at_once(sql):
    run = Run(sql, config(incomplete="drop", patience_s=10))
    run.store(3)
    for now_s in (0.0, 10.0):
        run.batch(1, now_s=now_s)
    assert sorted(run.ledger.rolling_out) == [1, 2]


def test_waiting_for_a_group_has_no_end_by_default(sql):
    run = Run(sql, config())
    run.store(0)
    for now_s in (0.0, 1e9):
        assert run.batch(1, now_s=now_s) == "1 of 2 groups are stored, 3 rolling out"
    assert not run.ledger.reasons


def test_smaller_bound_after_a_restart_drops_older_groups_and_refunds_them(sql):
    run = Run(sql, config(staleness=2))
    run.store(0, 1, 2, 3, 4)
    assert run.batch(1) == [0, 1]
    assert run.publish(1) == [6, 7]
    assert run.batch(2) == [2, 3]
    assert run.publish(2) == [8, 9]
    run.store(6, 7, 8)
    run.ledger.flush()
    smaller = Run.__new__(Run)
    smaller.ledger = Ledger(sql)
    smaller.admission = Admission(smaller.ledger, config(staleness=1), seed=0)
    smaller.admission.opened = True
    assert smaller.publish(2) == []  # 4, 6, 7, 8 are stored, 5 and 9 roll out
    assert smaller.batch(3) == [6, 7]
    assert smaller.ledger.reasons == {"stale": 1}
    assert smaller.ledger.account().balanced()
    assert smaller.publish(3) == [10]  # 8 stored, 5 and 9 out


def test_groups_are_used_again_only_when_too_few_are_fresh(sql):
    run = Run(sql, config(staleness=3, sampler=FifoSampler(max_reuse=2, min_samples_per_insert=2)))
    assert sorted(run.ledger.rolling_out) == [0, 1, 2, 3]  # (3 + 1) * 2 samples, two for each group
    run.store(0, 1, 2)
    assert run.batch(1) == [0, 1]
    run.publish(1)
    assert run.batch(2) == [2, 0]
    run.publish(2)
    assert run.batch(3) == [1, 2]
    run.publish(3)
    assert run.batch(4).startswith("0 of 2 groups are stored")


def test_exact_staleness_trains_each_group_the_same_number_of_versions_after_it_was_sampled(sql):
    run = Run(sql, config(groups=2, staleness=2, exact_staleness=True))
    run.store(0, 1, 2, 3, 4)
    assert "all groups issued at version 0" in run.batch(1)  # without it the step would go on
    run.store(5)
    lags = []
    for step in range(1, 9):
        lags += [step - 1 - (lease - 4) // 2 for lease in run.batch(step) if lease > 5]
        assert run.batch(step + 1) == f"version {step}, since staleness is exact"
        leases = run.publish(step)
        assert "2 are rolling out" in run.batch(step + 1)
        run.store(*leases)
    assert lags == [2] * 10


def test_exact_staleness_0_is_on_policy_and_goes_on(sql):
    run = Run(sql, config(groups=2, staleness=0, exact_staleness=True))
    for step in range(1, 4):
        run.store(2 * step - 2, 2 * step - 1)
        assert run.batch(step) == [2 * step - 2, 2 * step - 1]
        run.publish(step)


@pytest.mark.parametrize(("groups", "staleness", "reuse"), [(4, 4, 2), (4, 1, 2), (8, 8, 4), (32, 4, 4)])
def test_exact_staleness_gives_each_group_its_uses_in_the_last_steps_that_the_bound_allows(
    sql, groups, staleness, reuse
):
    sampler = FifoSampler(max_reuse=reuse, min_samples_per_insert=reuse)
    run = Run(sql, config(groups, staleness, exact_staleness=True, sampler=sampler))
    issued = dict.fromkeys(range(run.ledger.next_id), 0)
    run.store(*issued)
    lags: dict[int, list[int]] = {lease: [] for lease in issued}
    for step in range(1, 61):
        for lease in run.batch(step):
            lags[lease].append(step - 1 - issued[lease])
        new = run.publish(step)
        issued |= dict.fromkeys(new, step)
        lags |= {lease: [] for lease in new}
        run.store(*new)
    assert max(map(max, filter(None, lags.values()))) <= staleness
    steady = [lags[lease] for lease in issued if 30 <= issued[lease] < 60 - staleness]
    assert len(steady) > 5
    assert all(found == list(range(staleness - reuse + 1, staleness + 1)) for found in steady)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (FifoSampler(max_reuse=2), "min_samples_per_insert=1 lets more be issued; set it to 2"),
        (UniformSampler(max_reuse=2, min_samples_per_insert=2), "set sampler.type=fifo"),
    ],
)
def test_exact_staleness_refuses_uses_that_would_come_at_any_age(sampler, words):
    with pytest.raises(ValidationError, match=words):
        config(staleness=4, exact_staleness=True, sampler=sampler)
    config(staleness=4, sampler=sampler)
    config(staleness=4, exact_staleness=True, sampler=type(sampler)())


def test_admission_waits_until_each_group_had_its_samples(sql):
    run = Run(sql, config(staleness=1, sampler=FifoSampler(max_reuse=2, min_samples_per_insert=2)))
    assert run.ledger.next_id == 2  # four samples in reach, two for each
    run.store(0, 1)
    assert run.batch(1) == [0, 1]
    assert run.publish(1) == [2]  # two samples are still owed
    run.store(2)
    assert run.batch(2) == [2, 0]
    assert run.ledger.samples / run.ledger.inserted() == pytest.approx(4 / 3)


def test_step_waits_rather_than_sample_more_a_group_than_allowed(sql):
    sampler = UniformSampler(max_reuse=9, min_samples_per_insert=1, max_samples_per_insert=1.5)
    run = Run(sql, config(groups=3, staleness=2, sampler=sampler))
    run.store(0, 1, 2, 3, 4)
    assert len(run.batch(1)) == 3
    run.admission.on_policy(manifest(1))
    assert len(run.batch(2)) == 3  # six samples of five groups
    run.admission.on_policy(manifest(2))
    assert run.batch(3) == "1 more groups stored, by sampler.max_samples_per_insert; 4 are rolling out"
    run.store(5, 6, 7, 8)
    assert len(run.batch(3)) == 3


def test_same_step_gets_the_same_groups_also_from_another_process(sql):
    sampler = FreshnessSampler(importance_exponent=1.0)
    first = Run(sql, config(groups=3, staleness=2, sampler=sampler), seed=5)
    first.store(*range(9))
    first.ledger.flush()
    chosen = first.batch(1)  # never flushed: that process dies
    second = Admission(Ledger(sql), config(groups=3, staleness=2, sampler=sampler), seed=5)
    answer = second.batch(1, 0, now_s=0.0)
    assert [use.lease_id for use in answer] == chosen
    second._ledger.flush()
    assert [(u.lease_id, u.weight) for u in Ledger(sql).steps[1]] == [(u.lease_id, u.weight) for u in answer]


def test_rolled_back_uses_are_given_again_and_counted_once(sql):
    run = Run(sql, config(staleness=3, sampler=FifoSampler(max_reuse=2, min_samples_per_insert=2)))
    run.store(0, 1, 2)
    for step, expected in ((1, [0, 1]), (2, [2, 0]), (3, [1, 2])):
        assert run.batch(step) == expected
        run.admission.on_policy(manifest(step))
    run.admission.commit(1, "a")
    assert run.admission.resume(1, "b") == 4
    assert (run.ledger.samples, run.ledger.account().trained) == (2, 2)
    assert run.batch(2) == [2, 0]
    assert run.batch(3) == [1, 2]
    with pytest.raises(FencedError, match="learner a was replaced by b"):
        run.admission.commit(3, "a")
    run.ledger.flush()
    again = Ledger(sql)
    assert again.account() == run.ledger.account()
    assert sorted(again.used(0)) == [(group, 2) for group, _ in sorted(again.used(0))]


def in_memory(ledger: Ledger) -> int:
    """Groups that the ledger knows without the disk."""
    known = sum(map(len, ledger._given._groups.values()))
    return known + sum(map(len, ledger.steps.values())) + len(ledger.stored) + len(ledger.rolling_out)


@pytest.mark.parametrize("max_reuse", [1, 2])
def test_memory_holds_the_groups_since_the_last_checkpoint_however_long_a_run_goes_on(sql, max_reuse):
    sampler = FifoSampler(max_reuse=max_reuse, min_samples_per_insert=max_reuse)
    run = Run(sql, config(groups=4, staleness=2, sampler=sampler))
    most, given = [], {}
    for step in range(1, 301):
        run.store(*run.ledger.rolling_out)
        given[step] = run.batch(step)
        run.ledger.flush()
        run.publish(step)
        if step % 10 == 0:
            run.admission.commit(step, "a")
            assert not run.ledger.steps
        most.append(in_memory(run.ledger))
    assert max(most[-100:]) == max(most[100:200]) < 200
    assert {step: [use.lease_id for use in run.ledger.uses(step)] for step in given} == given
    run.ledger.flush()
    assert in_memory(Ledger(sql)) <= most[-1]
    assert run.admission.resume(150, "b") == 4 * 150  # from far back, all is there again
    if max_reuse == 1:  # else groups that came later fill it
        assert run.batch(151) == given[151]
    assert run.ledger.account().balanced()


def test_a_damaged_group_is_refunded_and_its_step_gets_others(sql):
    run = Run(sql, config(staleness=1))
    run.store(0, 1, 2)
    assert run.batch(1) == [0, 1]
    before = run.admission.room()
    assert run.admission.on_unreadable(1, [0, 2], "a") == [0]
    assert run.admission.room() == before + 1
    assert run.ledger.reasons == {"damaged": 1}
    assert run.batch(1) == [1, 2]
    assert run.admission.on_unreadable(1, [0], "a") == []
    assert run.batch(1) == [1, 2]
    run.admission.resume(0, "b")
    with pytest.raises(FencedError):
        run.admission.on_unreadable(1, [1], "a")


def test_a_damaged_group_that_a_step_trained_on_is_given_to_no_other(sql):
    run = Run(sql, config(staleness=3, sampler=FifoSampler(max_reuse=2, min_samples_per_insert=2)))
    run.store(0, 1, 2, 3)
    assert [run.batch(step) for step in (1, 2)] == [[0, 1], [2, 3]]
    assert run.batch(3) == [0, 1]
    assert run.admission.on_unreadable(3, [0], "a") == [0]
    run.ledger.flush()
    assert (run.ledger.account().trained, run.ledger.reasons) == (4, {})
    for ledger in (run.ledger, Ledger(sql)):
        assert {group.lease_id for group, _ in ledger.used(0)} == {1, 2, 3}
    assert run.batch(3) == [1, 2]
    run.admission.resume(0, "a")
    run.ledger.flush()
    for ledger in (run.ledger, Ledger(sql)):
        assert ledger.reasons == {"damaged": 1}
        assert ledger.account().balanced()


def test_a_learner_that_gives_its_next_batch_back_keeps_what_its_checkpoint_lacks(sql):
    run = Run(sql, config(staleness=3))
    run.store(*range(8))
    for step in (1, 2, 3, 4):
        run.batch(step)
    run.admission.commit(1, "a")
    needed = sorted(run.admission.unsettled())
    assert needed == [2, 3, 4, 5, 6, 7]
    assert run.admission.resume(3, "a") == 2  # step 4 is given back, and the checkpoint of 3 is being written
    assert sorted(run.admission.unsettled()) == needed
    run.ledger.flush()
    assert sorted(Admission(Ledger(sql), config(), seed=0).unsettled()) == needed
    run.admission.commit(3, "a")
    assert sorted(run.admission.unsettled()) == [6, 7]
    run.admission.resume(2, "b")
    assert sorted(run.admission.unsettled()) == [4, 5, 6, 7]
    assert run.batch(3) == [4, 5]  # which no checkpoint holds any more: b's is of step 2
    assert sorted(run.admission.unsettled()) == [4, 5, 6, 7]


def test_shards_keep_what_may_still_be_used_again(sql):
    run = Run(sql, config(staleness=1, sampler=FifoSampler(max_reuse=2)))
    run.store(0, 1, 2, 3)
    run.batch(1)
    run.admission.commit(1, "a")
    assert sorted(run.admission.unsettled()) == [0, 1, 2, 3]
    once = Admission(run.ledger, config(), seed=0)
    assert sorted(once.unsettled()) == [2, 3]


def test_step_after_a_resume_never_waits_for_groups_that_only_later_weights_may_sample(sql):
    """Larger batches use the groups taken back up before the version at which the open lease was issued."""
    run = Run(sql, config(groups=1, staleness=0))
    for step in (1, 2):
        run.store(step - 1)
        assert run.batch(step) == [step - 1]
        assert run.publish(step) == [step]
    larger = Admission(run.ledger, config(groups=3, staleness=0), seed=0)
    larger.opened = True
    larger.resume(0, "b")
    larger.on_policy(manifest(0, incarnation="b"))
    assert larger.issue() == []
    assert larger.state(2).policy_version == 2
    assert larger.batch(1, 0, now_s=0.0) == "2 of 3 groups are stored, 1 rolling out"
    assert larger.state(2).policy_version == 0  # else the actors would wait for version 2
    run.ledger.flush()
    assert Ledger(sql).rolling_out[2].policy_version == 0
    larger.on_stored(StoredGroups(shard=0, after=2, lease_ids=(2,), total=3))
    assert [use.lease_id for use in larger.batch(1, 0, now_s=0.0)] == [0, 2, 1]


def test_lease_of_a_quarantined_prompt_is_refunded_and_the_next_one_issued(sql):
    ledger = Ledger(sql)
    admission = Admission(ledger, config(), seed=0, is_quarantined={1, 4}.__contains__)
    admission.opened = True
    admission.on_policy(manifest(0))
    assert admission.issue() == [0, 2, 3, 5]
    assert ledger.reasons == {"skipped": 2}
    assert ledger.account().balanced()
    assert [admission.state(n).state for n in (0, 1, 7)] == ["open", "quarantined", "settled"]


# --- configuration ---


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"incomplete": "shorten"}, "close_short"),
        ({"sampler": FifoSampler(max_reuse=1, min_samples_per_insert=2)}, "at most 1 times"),
        ({"sampler": FifoSampler(max_reuse=9, min_samples_per_insert=3)}, "at most 2 times"),
        (
            {"sampler": FifoSampler(max_reuse=2, min_samples_per_insert=2, max_samples_per_insert=1)},
            "is below min_samples_per_insert=2",
        ),
        ({"sampler": {"type": "lifo"}}, "fifo"),
    ],
)
def test_configuration_that_cannot_be_kept_is_refused(changes: dict[str, object], complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        config(**changes)
