"""Messages survive the round trip, those of older and newer builds too."""

import dataclasses
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.codec import Message, decode, encode, fast_constructor
from bus.errors import SchemaError
from bus.evaluation_messages import EvaluationResult
from bus.requests import Located
from bus.trajectory import End, FinishReason, Parent, Trajectory, Turn
from tests.bus.example_messages import CLASSES, EVALUATED, EXAMPLES, POLICY, wire
from tests.factories import make_trajectory


def test_an_evaluation_of_an_older_build_does_not_say_that_rollouts_failed():
    assert decode(wire(EVALUATED, failed=...), EvaluationResult).failed == 0


@pytest.mark.parametrize("failed", [-1, 19])
def test_no_more_rollouts_failed_than_there_were(failed):
    with pytest.raises(SchemaError, match="cannot have failed with 9 prompts"):
        decode(wire(EVALUATED, failed=failed), EvaluationResult)


@pytest.mark.parametrize("versions", [(0, 1), (2, 1)])
def test_no_version_answers_for_a_later_one(versions):
    oldest, newest = versions
    with pytest.raises(SchemaError, match="cannot have answered for version 1"):
        decode(wire(EVALUATED, oldest_version=oldest, newest_version=newest), EvaluationResult)


def same(left: object, right: object) -> bool:
    """Equality that looks into arrays; types and dtypes count."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize(
    "wrong",
    [
        {"segments": ("a",)},
        {"segment_of": np.array([-1, 0], "<i4").tobytes()},
        {"rows": b""},
        {"rows": b"\xff" * 8},
    ],
)
def test_addresses_that_lead_nowhere_are_refused(wrong: dict[str, object]):
    two = Located(
        host="h", segments=("a", "b"), segment_of=np.array([0, 1], "i4"), rows=np.array([0, 1], "i4")
    )
    with pytest.raises(SchemaError, match=r"an address lies outside|rows in"):
        decode(wire(two, **wrong), Located)


def test_every_message_class_has_an_example():
    assert {type(example) for example in EXAMPLES} == set(CLASSES)


def test_every_tag_names_one_class():
    assert len({cls.tag for cls in CLASSES}) == len(CLASSES)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: m.tag)
def test_message_survives_the_round_trip(message: Message):
    assert same(decode(encode(message), *CLASSES), message)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: m.tag)
def test_a_fast_construction_equals_the_slow_one_and_is_frozen_too(message: Message):
    names = [field.name for field in dataclasses.fields(message)]
    values = {name: getattr(message, name) for name in reversed(names)}
    made = fast_constructor(type(message), *values)(*values.values())
    assert type(made) is type(message)
    assert same(made, type(message)(**values))
    for name in names:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, "another")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def turns(draw: st.DrawFn, length: int) -> tuple[Turn, ...]:
    """Turns that follow one another over all of the tokens."""
    ends = sorted([*draw(st.lists(st.integers(0, length), max_size=3)), length])
    return tuple(
        Turn(
            *span,
            finish_reason=draw(st.sampled_from(get_args(FinishReason))),
            temperature=draw(st.floats(0.01, 10)),
            top_p=draw(st.floats(0.01, 1)),
            top_k=draw(st.integers(0, 100)),
            reward=draw(st.none() | float32s),
        )
        for span in pairwise([0, *ends])
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 40))
    mask = draw(st.lists(st.booleans(), min_size=length, max_size=length).filter(any))

    def array(elements: st.SearchStrategy, dtype: str) -> np.ndarray:
        return np.array(draw(st.lists(elements, min_size=length, max_size=length)), dtype)

    versions = array(st.integers(0, 2**31 - 1), "int32")
    size = draw(st.integers(1, 64))
    return Trajectory(
        trajectory_id=draw(st.text()),
        group_id="g",
        lease_id=draw(st.integers(0, 2**63 - 1)),
        sample=draw(st.integers(0, size - 1)),
        group_size=size,
        rollout=draw(st.integers(0, 2**63 - 1)),
        token_ids=array(st.integers(0, 2**31 - 1), "int32"),
        loss_mask=np.array(mask),
        behaviour_logprobs=array(st.floats(-1e4, 0.0, width=32), "float32"),
        policy_versions=np.where(mask, versions, -1).astype("int32"),
        turns=draw(turns(length)),
        reward=draw(float32s),
        end=draw(st.sampled_from(get_args(End))),
        agent=draw(st.text()),
        policy=draw(st.text()),
        parent=draw(st.none() | st.builds(Parent, st.just("g.parent"), st.integers(0, length))),
        trainable=draw(st.booleans()),
        reward_components=draw(st.dictionaries(st.text(), float32s, max_size=3)),
        metadata=draw(st.dictionaries(st.text(), json_values, max_size=3)),
        reward_due=draw(st.booleans()),
        run=draw(st.text()),
    )


@given(trajectories())
@settings(max_examples=12)
def test_any_valid_trajectory_survives_the_round_trip(trajectory: Trajectory):
    assert same(decode(encode(trajectory), Trajectory), trajectory)


def test_decoded_arrays_cannot_be_written_to():
    decoded = decode(encode(make_trajectory()), Trajectory)
    with pytest.raises(ValueError, match="read-only"):
        decoded.token_ids[0] = 1


def test_unknown_field_of_a_newer_build_is_passed_over():
    changed = wire(make_trajectory(), mood="cheerful")
    assert same(decode(changed, Trajectory), make_trajectory())


def test_turns_of_a_newer_build_keep_what_this_one_knows():
    newer = wire(make_trajectory(), turns=[[4, 8, "stop", 1.0, 1.0, 0, None, 0.0, "new"]])
    assert decode(newer, Trajectory).turns == (Turn(4, 8, "stop"),)


@pytest.mark.parametrize(("version", "deltas"), [(7, 0), (5, 1), (4, 2), (6, None), (3, None)])
def test_manifest_knows_the_deltas_since_a_version(version, deltas):
    found = POLICY.since(version)
    assert (None if found is None else len(found)) == deltas
