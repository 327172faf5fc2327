import json
from types import SimpleNamespace

import pytest

from bus.errors import StorageError
from bus.requests import GroupRef
from learner.backends.contract.backend import StepResult
from learner.progress.lineage import TrainedStep, read, record, refuse_other_groups, resumes, steps
from learner.step.rl_step import lineage_line


def line(step, incarnation="a", leases=(), **values):
    return TrainedStep(
        step=step, policy_version=step, incarnation=incarnation, leases=tuple(leases), **values
    )


def write(path, *lines):
    for one in lines:
        record(path, one)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lineage.jsonl"


def test_of_a_step_trained_again_the_last_time_counts(path):
    write(path, line(1, "a", [0, 1]), line(2, "a", [2, 3]), line(3, "a", [4]), line(2, "b", [3, 5]))
    with path.open("a") as file:
        file.write('{"step":3,"leases"')  # killed while it wrote
    assert read(path, until_step=2) == {1: [0, 1], 2: [3, 5]}


def test_a_run_that_trained_nothing_has_no_lineage(path):
    assert read(path, until_step=9) == {}


def test_a_line_is_read_as_it_was_written(path):
    written = line(
        1, leases=[3, 1], weights=(1.0, 0.3), batch_xxh3="ab", loss=-0.1, grad_norm=1 / 3, entropy=2.5,
        lr=1e-6, skipped=False,
    )  # fmt: skip
    assert steps(write(path, written)) == {1: written}


def test_a_line_of_an_older_build_lacks_what_that_did_not_write(path):
    path.write_text(json.dumps({"step": 1, "policy_version": 1, "incarnation": "a", "leases": [4]}) + "\n")
    assert steps(path) == {1: line(1, leases=[4])}


def test_a_line_below_one_that_was_cut_short_is_not_lost(path):
    write(path, line(1))
    with path.open("a") as file:
        file.write('{"step":2,"lea')
    assert list(steps(write(path, line(2, "b")))) == [1, 2]


def test_steps_after_one_that_was_trained_again_are_gone_with_their_weights(path):
    write(path, line(1), line(2), line(3), line(2, "b"))
    assert [(s.step, s.incarnation) for s in steps(path).values()] == [(1, "a"), (2, "b")]


def test_a_resume_is_counted_when_another_learner_trains(path):
    assert resumes(path) == 0
    write(path, line(1, "a"), line(2, "a"))
    assert resumes(path) == 0
    write(path, line(2, "b"), line(3, "b"), line(3, "c"))
    assert resumes(path) == 2


def test_the_last_line_of_a_learner_that_was_replaced_meanwhile_does_not_count(path):
    write(path, line(1, "a"), line(2, "b", [7]), line(3, "b"), line(2, "a", [8]), line(4, "b"))
    assert [s.incarnation for s in steps(path).values()] == ["a", "b", "b", "b"]


def test_groups_of_another_history_are_refused_and_both_are_named(path):
    write(path, line(1, leases=[1, 2]), line(2, leases=[3, 4]))
    refuse_other_groups(path, {1: [1, 2], 2: [3, 4], 3: [5]})
    with pytest.raises(StorageError, match=r"step 2 on groups \[3, 5\], but .*lineage.jsonl says \[3, 4\]"):
        refuse_other_groups(path, {2: [3, 5]})


def test_a_line_has_groups_in_the_order_of_their_step_and_with_its_weights():
    groups = [GroupRef(lease_id=7, shard=0, weight=0.25), GroupRef(lease_id=4, shard=1, weight=3.0)]
    batch = SimpleNamespace(xxh3=lambda: "ab")
    result = StepResult(
        loss=0.5, grad_norm=1.0, lr=1e-3, tokens=8, computed_tokens=9, denominator=8.0, skipped=False,
        diagnostics={},
    )  # fmt: skip
    found = lineage_line(3, 4, "a", groups, batch, result)
    assert (found.leases, found.weights, found.policy_version) == ((7, 4), (0.25, 3.0), 4)
