"""Tokens over keys and values of older weights are told in a message, and what cannot be is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.codec import decode, encode
from bus.errors import SchemaError
from bus.older_kv import RUN, joined_kv_versions, kv_versions_from, older_kv_bytes
from bus.trajectory import KeptTurn, Trajectory
from tests.factories import make_trajectory, make_turn


def versions(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 3)), max_size=12))
def test_runs_tell_the_versions_of_every_token_back(tokens):
    policy = versions(*(version for version, _ in tokens))
    kv = np.where(policy < 0, policy, versions(*(version for _, version in tokens)))
    runs = older_kv_bytes(kv, policy)
    found = kv_versions_from(runs, policy)
    assert (policy if found is None else found).tolist() == kv.tolist()
    assert (found is None) == (kv.tolist() == policy.tolist())


def test_one_run_of_many_tokens_takes_twelve_bytes():
    policy = versions(-1, 3, 3, *[4] * 1000)
    assert len(older_kv_bytes(np.where(policy == 4, 3, policy).astype(np.int32), policy)) == 12
    assert older_kv_bytes(policy, policy) == older_kv_bytes(None, policy) == b""


def test_parts_that_follow_one_another_keep_theirs():
    parts = [(None, versions(1, 1)), (versions(1, 1), versions(1, 2))]
    joined = joined_kv_versions(parts)
    assert joined is not None
    assert joined.tolist() == [1, 1, 1, 1]
    assert joined_kv_versions([(None, versions(1))]) is None


def test_messages_carry_them_and_those_of_an_older_build_are_fresh():
    whole = replace(make_trajectory(policy_version=2), older_kv=np.array([(5, 7, 1)], RUN).tobytes())
    found = decode(encode(whole), Trajectory)
    assert found.kv_versions is not None
    assert found.kv_versions.tolist() == [-1, -1, -1, -1, 2, 1, 1, 2]
    assert make_trajectory().kv_versions is None
    turn = replace(make_turn(policy_version=2), older_kv=np.array([(0, 4, 0)], RUN).tobytes())
    assert decode(encode(turn), KeptTurn).older_kv == turn.older_kv


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ([(5, 9, 0)], r"tokens \[5, 9\) of 8"),
        ([(6, 6, 0)], r"tokens \[6, 6\)"),
        ([(5, 7, 0), (6, 8, 1)], "after a run to 7"),
        ([(5, 7, -1)], "version -1"),
        ([(-2, 7, 0)], r"tokens \[-2, 7\)"),
        ([(3, 5, 0)], "were not all sampled"),
    ],
)
def test_runs_that_cannot_be_are_refused(runs, says):
    wrong = replace(make_trajectory(), older_kv=np.array(runs, RUN).tobytes())
    with pytest.raises(SchemaError, match=says):
        wrong.check()
    with pytest.raises(SchemaError, match="13 bytes"):
        replace(make_turn(), older_kv=b"x" * 13).check()
