"""The brake on admission: what is issued while few tokens carry the updates, and when that ends."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from pydantic import ValidationError

from storage.dispatch.admission import Admission
from storage.ledger.ledger import Ledger, prepare
from storage.settings.admission import AdmissionConfig, EssBrakeConfig, FifoSampler
from tests.storage.dispatch.admitting_run import Run
from tests.storage.serving import has, manifest, send_groups, serving, until

BRAKE = EssBrakeConfig(below=0.5, steps=2)
AHEAD_OF_TWO = AdmissionConfig(groups_per_step=2, samples_per_prompt=2, max_staleness=2, ess_brake=BRAKE)


@pytest.fixture
def sql() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)) as connection:
        prepare(connection)
        yield connection


def train(run: Run, step: int, ess_fraction: float | None) -> list[int]:
    """Train a step on stored groups and publish; the leases issued then."""
    assert not isinstance(run.batch(step), str)
    run.admission.on_policy(manifest(step, ess_fraction=ess_fraction))
    return run.admission.issue()


def test_brake_holds_back_leases_until_the_queue_is_drained_and_lets_go_when_the_figure_recovers(sql):
    """Two groups a step, up to two steps ahead: six are out at the start."""
    run = Run(sql, AHEAD_OF_TWO)
    run.store(*range(6))
    assert train(run, 1, 0.4) == [6, 7]  # one step below the threshold does not brake yet
    run.store(6, 7)
    assert train(run, 2, 0.3) == []  # the second does: four groups are stored, and the next step needs two
    assert run.admission.brake.reason == (
        "waiting for the effective sample size: it was 0.300 in the step of version 2, and "
        "admission.ess_brake lets go after 2 steps in a row of at least 0.5; until then leases are issued "
        "for the next step alone"
    )
    assert train(run, 3, 0.3) == []  # what is stored is trained on: two groups are left, which is one step's
    assert train(run, 4, 0.45) == [8, 9]  # drained: a step gets its groups from the newest version
    assert run.ledger.rolling_out[8].policy_version == 4
    run.store(8, 9)
    assert train(run, 5, 0.9) == [10, 11]  # one good step: it still holds
    run.store(10, 11)
    assert train(run, 6, None) == [12, 13]  # a step without a figure changes nothing
    run.store(12, 13)
    assert train(run, 7, 0.5) == list(range(14, 20))  # the second at the threshold: all three steps' again
    assert run.admission.brake.reason == ""


def test_a_learner_that_pauses_admission_gets_the_groups_of_its_next_step_alone(sql):
    run = Run(sql, AHEAD_OF_TWO)
    run.store(*range(6))
    reason = "engines and learner disagree about the policy"
    for step, issued in ((1, []), (2, []), (3, [6, 7])):
        assert not isinstance(run.batch(step), str)
        run.admission.on_policy(manifest(step, pause_reason=reason))
        assert run.admission.held_back == f"admission is paused: {reason}"
        assert run.admission.issue() == issued
    run.store(6, 7)
    run.admission.on_policy(manifest(4))
    assert run.admission.held_back == ""
    assert len(run.admission.issue()) > 2


def test_a_good_step_in_between_starts_the_count_again(sql):
    run = Run(sql, AHEAD_OF_TWO)
    run.store(*range(6))
    for step, fraction in enumerate((0.4, 0.6, 0.4), 1):
        issued = train(run, step, fraction)
        run.store(*issued)
    assert len(issued) == 2
    assert not run.admission.brake.holds
    train(run, 4, 0.4)
    assert run.admission.brake.holds


def test_a_version_that_is_announced_again_counts_once(sql):
    run = Run(sql, AHEAD_OF_TWO)
    run.admission.on_policy(manifest(1, ess_fraction=0.1))
    run.admission.on_policy(manifest(1, ess_fraction=0.1, stage="done"))
    assert not run.admission.brake.holds
    run.admission.on_policy(manifest(2, ess_fraction=0.1))
    assert run.admission.brake.holds


def test_restart_of_storage_keeps_the_brake_and_a_resumed_learner_begins_to_count_anew(sql):
    run = Run(sql, AHEAD_OF_TWO)
    run.admission.on_policy(manifest(1, ess_fraction=0.1))
    run.admission.on_policy(manifest(2, ess_fraction=0.1))
    run.admission.on_policy(manifest(3, ess_fraction=0.8))
    run.ledger.flush()
    again = Admission(Ledger(sql), AHEAD_OF_TWO, seed=0)
    assert again.brake.reason == run.admission.brake.reason != ""
    again.resume(2, "b")
    again.on_policy(manifest(2, incarnation="b"))
    again.on_policy(manifest(3, incarnation="b", ess_fraction=0.8))
    assert again.brake.holds  # the good step of the learner before was taken back
    again.on_policy(manifest(4, incarnation="b", ess_fraction=0.8))
    assert not again.brake.holds
    without = Admission(Ledger(sql), AdmissionConfig(max_staleness=2), seed=0)
    assert not without.brake.holds


def test_groups_that_are_used_twice_are_issued_in_time_while_the_brake_holds(sql):
    """Of two groups a step, each used twice, one is new; issued for one step alone it would come too late."""
    config = AHEAD_OF_TWO.model_copy(update={"sampler": FifoSampler(max_reuse=2, min_samples_per_insert=2.0)})
    run = Run(sql, config)
    run.store(*run.ledger.rolling_out)
    for step in range(1, 12):
        run.store(*train(run, step, 0.1))
    assert run.admission.brake.holds


def test_brake_that_can_have_no_effect_is_refused():
    with pytest.raises(ValidationError, match=r"has no effect with admission\.max_staleness=0"):
        AdmissionConfig(max_staleness=0, ess_brake=EssBrakeConfig(below=0.5))


@pytest.mark.nats
@pytest.mark.usefixtures("quick")
async def test_dispatcher_hears_the_figure_holds_leases_back_and_says_why(bus, learner, tmp_path):
    async with serving(bus, tmp_path, AHEAD_OF_TWO) as storage:
        dispatcher = storage.dispatcher
        await learner.publish(0)
        await has(bus, "TASKS", 6)
        await send_groups(bus, range(6))
        for step, fraction in enumerate((0.2, 0.2), 1):
            await learner.batch(step)
            await learner.publish(step, ess_fraction=fraction)
            await until(lambda step=step: dispatcher.policy.policy_version == step)
        assert "waiting for the effective sample size: it was 0.200" in dispatcher.held_back
        await has(bus, "TASKS", 8)  # two for version 1, none for version 2
        await send_groups(bus, [6, 7])
        for step, fraction, issued in ((3, 0.2, 8), (4, 0.9, 10)):
            await learner.batch(step)
            await learner.publish(step, ess_fraction=fraction)
            await has(bus, "TASKS", issued)
        await send_groups(bus, [8, 9])
        await learner.batch(5)
        await learner.publish(5, ess_fraction=0.9)
        await has(bus, "TASKS", 16)
        assert dispatcher.held_back == ""
