"""Tests what `decode` lets in and what it refuses."""

import dataclasses
import importlib
import pkgutil
import random
import time
from itertools import pairwise
from typing import get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bus
from bus.agent_rewards import AgentReward
from bus.blob_requests import BlobAccess, BlobAccessAsked, BlobAsked, BlobOffer
from bus.broadcast_messages import BroadcastBegin, BroadcastEnd, BroadcastWanted, GroupLeft, OfferedBucket
from bus.codec import MAX_DEPTH, Message, decode, encode, fast_constructor
from bus.device_messages import DeviceHold, DeviceUser
from bus.errors import SchemaError
from bus.evaluation_messages import EvaluationResult, EvaluationTask, PromptSet
from bus.images import ImageCount
from bus.messages import (
    AdaptedBase,
    BlobRef,
    DeadLetter,
    DeltaRef,
    GroupRejected,
    KeptVersion,
    Metrics,
    ModelFiles,
    Pace,
    PolicyManifest,
    Probe,
    Prompt,
    RewardGiven,
    RoleHolder,
    RunIdentity,
    RunRecord,
    SnapshotWanted,
    Status,
)
from bus.refusal import Refused
from bus.requests import (
    BatchLease,
    BatchRequest,
    Closed,
    CloseRequest,
    DataAccepted,
    Done,
    EngineChange,
    FullGroups,
    FullGroupsRequest,
    GroupRef,
    GroupStatus,
    GroupStatusRequest,
    GroupsUnreadable,
    Issued,
    IssuedRequest,
    KeptTurnsRequest,
    LearnerResumed,
    LeaseRequest,
    LeaseState,
    Located,
    LocateRequest,
    NewData,
    ReadRequest,
    StepCommitted,
    StepGroups,
    StepGroupsRequest,
    StoredGroups,
    StoredRequest,
    Unsettled,
    UnsettledRequest,
    Waiting,
)
from bus.trajectory import (
    End,
    FinishReason,
    KeptTurn,
    Parent,
    Trajectory,
    TrajectoryBatch,
    Turn,
    refuse_impossible_logprobs,
)
from tests.factories import make_lease, make_trajectory, make_turn

MODULES = [importlib.import_module(f"bus.{module.name}") for module in pkgutil.iter_modules(bus.__path__)]
CLASSES = [
    c
    for module in MODULES
    for c in vars(module).values()
    if isinstance(c, type) and issubclass(c, Message) and c.tag and c.__module__ == module.__name__
]
"""Every message of the bus, whichever file declares it."""
BLOB = BlobRef(subject="sluice.test.weights.7", chunks=2, size_bytes=700_000, digest="ab" * 16)
DELTAS = (
    DeltaRef(base_version=4, policy_version=5, blob=BLOB),
    DeltaRef(base_version=5, policy_version=7, blob=BLOB),
)
PROBE = Probe(token_ids=((1, 2, 3), (4, 5)), logprobs=((-0.5, -1.25), (-2.0,)))
KEPT = KeptVersion(policy_version=3, snapshot=BLOB)
ADAPTED = AdaptedBase(weights=BLOB, scale=2.0, rank=8, modules=("mlp.up_proj", "self_attn.q_proj"))
POLICY = PolicyManifest(
    policy_version=7, incarnation="a1", snapshot=BLOB, model=BLOB, stage="rl", trains_from=2, deltas=DELTAS,
    probe=PROBE, kept=(KEPT,), adapted=ADAPTED,
)  # fmt: skip
CHAT = Prompt(
    content=[{"role": "user", "content": "2+2?"}], label=None, metadata={"level": 3, "tags": ["a", None]}
)
EVALUATED = EvaluationResult(
    policy_version=1, incarnation="a", sampled=0.5, greedy=1.0, prompts=9, seconds=2.5,
    oldest_version=1, newest_version=3, failed=2,
)  # fmt: skip
EXAMPLES = (
    CHAT,
    PROBE,
    Pace(slower=2.5),
    DELTAS[0],
    KEPT,
    ADAPTED,
    BlobAsked(blob=BLOB),
    BlobOffer(
        url="https://10.0.0.1:8000", access=BlobAccess(token="t", certificate="-----BEGIN CERTIFICATE-----")
    ),
    BlobAccess(token="t", certificate="-----BEGIN CERTIFICATE-----"),
    BlobAccessAsked(),
    EngineChange(action="join", engine="http://10.0.0.1:30000"),
    BroadcastWanted(incarnation="a1", policy_version=7, group="", ranks=2, device="cuda"),
    OfferedBucket(
        group="sluice-a1-0",
        host="10.0.0.1",
        port=29500,
        backend="nccl",
        policy_version=7,
        names=("scalar", "embedding"),
        dtypes=("bfloat16", "float32"),
        shapes=((), (40, 32)),
    ),
    BroadcastBegin(group="sluice-a1-0", policy_version=7),
    BroadcastEnd(group="sluice-a1-0", policy_version=7),
    GroupLeft(group="sluice-a1-0"),
    DeviceHold(incarnation="a1", number=3, host="6f1c", held=True),
    DeviceUser(actor="a-1", host="6f1c", yielded_to="a1.3"),
    SnapshotWanted(incarnation="a1", policy_version=7, reason="chunk 1 of 3 is not on the bus"),
    make_lease(3),
    make_trajectory(3, 1),
    TrajectoryBatch(trajectories=(make_trajectory(1, 0), make_trajectory(1, 1))),
    TrajectoryBatch(trajectories=()),
    make_turn(3, 1, 2),
    TrajectoryBatch(trajectories=(), turns=(make_turn(3, 1, 2), make_turn(3, 0, 0, tokens=0))),
    GroupRejected(lease_id=3, reason="zero_variance", detail="all 1.0", actor="a"),
    IssuedRequest(shard=1),
    StepGroupsRequest(step=4),
    StepGroups(
        step=4,
        groups=(GroupRef(lease_id=3, shard=1, weight=0.5, tokens=70),),
        incarnation="a1",
        trained_through=3,
        trains_from=1,
        stage="rl",
    ),
    Issued(
        next_id=12,
        seen=5,
        run="f00",
        vocabulary=151_936,
        newest_version=7,
        rolling_out=(8, 10),
        versions=(6, 7),
    ),
    UnsettledRequest(),
    Unsettled(lease_ids=(3, 5)),
    BLOB,
    POLICY,
    ModelFiles(names=("config.json", "empty"), contents=(b"{}", b"")),
    BatchRequest(step=1, policy_version=2, incarnation="a1"),
    GroupRef(lease_id=1, shard=0),
    BatchLease(step=1, groups=(GroupRef(lease_id=1, shard=0), GroupRef(lease_id=2, shard=1))),
    Waiting(reason="2 of 4 groups"),
    StepCommitted(step=10, incarnation="a1"),
    LearnerResumed(step=10, incarnation="a2"),
    GroupsUnreadable(step=3, lease_ids=(4, 7), incarnation="a1", reason="torn"),
    Refused(reason="fenced"),
    Done(),
    ReadRequest(lease_ids=(1, 2, 3)),
    LocateRequest(lease_ids=(1, 2, 3), host="here"),
    Located(
        host="here",
        directory="/replay",
        device=2,
        inode=9,
        segments=("segment_00000001", "segment_00000004-00000006"),
        segment_of=np.array([0, 1, 1], np.int32),
        rows=np.array([3, 0, 1], np.int32),
    ),
    StoredRequest(after=5),
    StoredGroups(shard=1, after=5, lease_ids=(7, 9), total=7, tokens=(16, 20)),
    StoredGroups(shard=1, after=5, lease_ids=(7,), total=7, tokens=(16,), images=(ImageCount(2, 12),)),
    EvaluationTask(policy=POLICY, prompts=BLOB),
    PromptSet(prompts=(CHAT, Prompt(content="plain"))),
    EVALUATED,
    Metrics(source="learner", step=3, time_s=1.75e9, values={"train/loss": 0.5, "train/note": "x"}),
    Status(source="a", role="actors", doing="rolls out", pid=1, peak_rss_bytes=2, values={"busy": 3}),
    DeadLetter(subject="s", reason="r", data=b"\x00\xff", origin="9", kind="version", actor="a"),
    RewardGiven(trajectory_id="g00000012.3", reward=-0.5, source="judge"),
    FullGroupsRequest(lease_ids=(1, 2)),
    FullGroups(lease_ids=(2,)),
    RunRecord(name="test", config_json="{}"),
    RoleHolder(incarnation="a1", host="h", pid=9),
    RunIdentity(identity="ab", host="h", directory="/runs/r"),
    LeaseRequest(lease_id=3, attempt=True),
    LeaseState(state="open", policy_version=2),
    GroupStatusRequest(lease_id=3),
    GroupStatus(group_size=4, samples=(0, 2), rewards=(AgentReward("default", "solver", 0, 1.0),)),
    KeptTurnsRequest(lease_id=3),
    NewData(prompts=BLOB, keep_old=True, source="new.jsonl"),
    DataAccepted(first_lease=9, prompts=12),
    CloseRequest(lease_ids=(3, 5)),
    Closed(lease_ids=(3,)),
)


def test_an_evaluation_of_an_older_build_was_drawn_by_its_version_alone():
    found = decode(wire(EVALUATED, oldest_version=..., newest_version=...), EvaluationResult)
    assert (EVALUATED.drawn_by, found.drawn_by) == ((1, 3), (1, 1))


def test_an_evaluation_of_an_older_build_does_not_say_that_rollouts_failed():
    assert decode(wire(EVALUATED, failed=...), EvaluationResult).failed == 0


@pytest.mark.parametrize("failed", [-1, 19])
def test_no_more_rollouts_failed_than_there_were(failed):
    with pytest.raises(SchemaError, match="cannot have failed with 9 prompts"):
        decode(wire(EVALUATED, failed=failed), EvaluationResult)


@pytest.mark.parametrize("versions", [(0, 1), (2, 1), (None, 0)])
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


def wire(message: Message, **changes: object) -> bytes:
    """The encoded message with some fields replaced; `...` removes one."""
    tag, version, body = msgpack.unpackb(encode(message))
    body |= changes
    return msgpack.packb([tag, version, {k: v for k, v in body.items() if v is not ...}])


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
@settings(max_examples=30)
def test_any_valid_trajectory_survives_the_round_trip(trajectory: Trajectory):
    assert same(decode(encode(trajectory), Trajectory), trajectory)


def test_decoded_arrays_cannot_be_written_to():
    decoded = decode(encode(make_trajectory()), Trajectory)
    with pytest.raises(ValueError, match="read-only"):
        decoded.token_ids[0] = 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"hello",
        b"\x93",
        msgpack.packb({"a": 1}),
        msgpack.packb(["done", 1]),
        encode(Done()) + b"x",
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes):
    with pytest.raises(SchemaError, match=r"not MessagePack|not a message"):
        decode(data, Done)


def test_unexpected_message_is_refused_by_name():
    with pytest.raises(SchemaError, match=r"unexpected message 'done': expected waiting or refused"):
        decode(encode(Done()), Waiting, Refused)


def test_tag_of_a_wrong_type_is_refused_in_few_words():
    with pytest.raises(SchemaError, match="unexpected message") as caught:
        decode(msgpack.packb(["x" * 100_000, 1, {}]), Done)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("version", "reason"),
    [(2, "newer than this build's 1"), (0, "older"), (True, "not a number"), (1.0, "not a number")],
)
def test_other_schema_version_is_refused(version: object, reason: str):
    with pytest.raises(SchemaError, match=reason):
        decode(msgpack.packb(["done", version, {}]), Done)


TRAJECTORY_DEFAULTS = {
    "agent": "solver",
    "policy": "default",
    "parent": None,
    "trainable": True,
    "reward_components": {},
    "actor": "",
    "metadata": {},
    "reward_due": False,
    "run": "",
    "routed_experts": b"",
    "moe_layers": 0,
    "experts_per_token": 0,
    "kept_counts": b"",
    "kept_tokens": b"",
    "images": (),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Trajectory)])
def test_missing_field_is_refused_unless_it_has_a_default(field: str):
    data = wire(make_trajectory(), **{field: ...})
    if field in TRAJECTORY_DEFAULTS:
        assert getattr(decode(data, Trajectory), field) == TRAJECTORY_DEFAULTS[field]
    else:
        with pytest.raises(SchemaError, match=f"trajectory.{field}: missing"):
            decode(data, Trajectory)


def test_unknown_field_of_a_newer_build_is_passed_over():
    changed = wire(make_trajectory(), mood="cheerful")
    assert same(decode(changed, Trajectory), make_trajectory())


NAN4 = np.full(8, np.nan, "<f4").tobytes()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trajectory_id": 7}, "trajectory.trajectory_id: expected str, found int"),
        ({"trajectory_id": b"g"}, "expected str, found bytes"),
        ({"lease_id": "7"}, "trajectory.lease_id: expected an integer"),
        ({"lease_id": 7.0}, "expected an integer"),
        ({"lease_id": True}, "expected an integer"),
        ({"lease_id": 2**63}, "integer of 64 bits"),
        ({"reward": "1"}, "trajectory.reward: expected a number"),
        ({"reward": True}, "expected a number"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"reward": 1e39}, "reward is 1e"),
        ({"token_ids": [1] * 8}, "trajectory.token_ids: not the bytes of a int32 array"),
        ({"token_ids": b"\0" * 31}, "not the bytes"),
        ({"token_ids": b"\0" * 28}, r"arrays of \[7, 8, 8, 8\]"),
        ({"token_ids": np.arange(8, dtype="<i8").tobytes()}, r"arrays of \[16, 8, 8, 8\]"),
        ({"token_ids": np.full(8, -1, "<i4").tobytes()}, "negative"),
        ({"policy_versions": np.full(8, -1, "<i4").tobytes()}, "negative"),
        ({"loss_mask": b"\0\0\0\0\1\1\1\2"}, "trajectory.loss_mask: a boolean array holds other bytes"),
        ({"loss_mask": b"\1\1\2\1\1\1\1\1"}, "holds other bytes"),
        ({"loss_mask": b"\1" * 7}, r"arrays of \[8, 7, 8, 8\]"),
        ({"loss_mask": b"\0" * 8}, "no token to train on among 8"),
        ({"behaviour_logprobs": NAN4}, "log-prob is not finite"),
        ({"behaviour_logprobs": np.full(8, -np.inf, "<f4").tobytes()}, "log-prob is not finite"),
        ({"sample": 2}, "sample 2 of a group of 2"),
        ({"sample": -1}, "sample -1"),
        ({"end": "tired"}, "trajectory.end: expected one of 'completed'"),
        ({"end": []}, "expected one of"),
        ({"rollout": -1}, "rollout -1 of its prompt"),
        ({"turns": [[4, 8]]}, "trajectory.turns: a turn of 2 fields, of which 3 are required"),
        ({"turns": [[4, 8, "tired"]]}, "trajectory.turns: turn .*: expected one of 'stop'"),
        ({"turns": {}}, "trajectory.turns: expected list, found dict"),
        ({"turns": []}, "outside its turns"),
        ({"turns": [[5, 8, "stop"]]}, "outside its turns"),
        (
            {"turns": [[4, 9, "stop"]]},
            r"the turn of tokens \[4, 9\) does not lie between token 0 and the end, 8",
        ),
        ({"turns": [[-1, 8, "stop"]]}, r"the turn of tokens \[-1, 8\)"),
        ({"turns": [[0, 5, "stop"], [4, 8, "stop"]]}, r"\[4, 8\) does not lie between token 5"),
        ({"turns": [[6, 4, "stop"]]}, r"the turn of tokens \[6, 4\)"),
        ({"turns": [[4, 8, "stop", -0.5]]}, "sampled at temperature -0.5"),
        ({"turns": [[4, 8, "stop", float("inf")]]}, "sampled at temperature inf"),
        ({"turns": [[4, 8, "stop", float("nan")]]}, "sampled at temperature nan"),
        ({"turns": [[4, 8, "stop", 0.0]]}, "tokens of a greedy turn"),
        ({"turns": [[4, 8, "stop", 1.0, 0.0]]}, "top_p 0.0"),
        ({"turns": [[4, 8, "stop", 1.0, 1.0, -1]]}, "top_k -1"),
        ({"turns": [[4, 8, "stop", 1.0, 1.0, 0, float("nan")]]}, "the reward of a turn is nan"),
        ({"parent": ["g00000000.1"]}, "trajectory.parent: a parent of 1 fields"),
        ({"parent": ["g00000001.1", 2]}, "cannot have been forked from"),
        ({"parent": ["g00000000.0", 2]}, "cannot have been forked from"),
        ({"parent": ["g00000000.1", 9]}, "cannot have been forked from"),
        ({"trainable": 1}, "trajectory.trainable: expected bool, found int"),
        ({"reward_components": {"format": "1"}}, "reward component 'format' is '1'"),
        ({"reward_components": {"format": float("nan")}}, "reward component 'format' is nan"),
        ({"metadata": []}, "trajectory.metadata: expected dict, found list"),
        ({"metadata": {"a": b"bytes"}}, "expected JSON, found bytes"),
        ({"metadata": {b"a": 1}}, "a key is not a string"),
        ({"metadata": {"a": msgpack.ExtType(5, b"x")}}, "expected JSON, found ExtType"),
        ({"metadata": {"a": msgpack.Timestamp(1)}}, "expected JSON, found Timestamp"),
    ],
)
def test_bad_field_of_a_trajectory_is_refused_by_name(changes: dict[str, object], reason: str):
    with pytest.raises(SchemaError, match=reason):
        decode(wire(make_trajectory(), **changes), Trajectory)


@pytest.mark.parametrize("logprob", [0.02, 5.0, 1e30, -2e4])
def test_logprobs_that_no_engine_reports_are_refused_before_they_are_stored_and_read_afterwards(logprob):
    values = make_trajectory().behaviour_logprobs.copy()
    values[5] = logprob
    stored = dataclasses.replace(make_trajectory(), behaviour_logprobs=values, actor="actor-7")
    assert np.array_equal(decode(encode(stored), Trajectory).behaviour_logprobs, values)
    with pytest.raises(SchemaError, match=r"log-prob is .*, but no engine can have drawn") as caught:
        refuse_impossible_logprobs(stored)
    assert (caught.value.kind, caught.value.actor) == ("logprob", "actor-7")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": b"\0" * 8}, r"arrays of \[2, 4, 4\] tokens are not of one length"),
        ({"rollout": -1}, "there is no such turn"),
        ({"policy_versions": b"\xff" * 16}, "a token id or a version is negative"),
        ({"behaviour_logprobs": np.full(4, np.nan, np.float32).tobytes()}, "a behaviour log-prob is nan"),
        ({"routed_experts": b"\0" * 5, "moe_layers": 2, "experts_per_token": 2}, "5 routed experts in rows"),
        ({"routed_experts": b"\0" * 4}, "4 routed experts in rows of 0"),
        ({"kept_counts": b"\1\0" * 3}, "6 bytes of kept counts for 4 tokens"),
        ({"finish_reason": "tired"}, "expected one of 'stop', 'length', 'abort'"),
    ],
)
def test_a_turn_that_cannot_be_is_refused_by_name(changes: dict[str, object], reason: str):
    with pytest.raises(SchemaError, match=reason):
        decode(wire(make_turn(3, 1, 2), **changes), KeptTurn)


def test_only_what_is_not_trained_may_be_empty():
    arrays = ("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions")
    empty = {**dict.fromkeys(arrays, b""), "turns": []}
    with pytest.raises(SchemaError, match="no token to train on among 0"):
        decode(wire(make_trajectory(), **empty), Trajectory)
    failed = decode(wire(make_trajectory(), **empty, end="tool_error"), Trajectory)
    assert (failed.is_trained, failed.finish_reason, failed.newest_version) == (False, "abort", -1)
    assert failed.oldest_version > 10**9  # nothing in it is stale


def test_a_greedy_turn_is_recorded_outside_the_mask():
    recorded = wire(make_trajectory(), turns=[[4, 8, "stop", 0.0]], loss_mask=b"\0" * 8, trainable=False)
    [turn] = decode(recorded, Trajectory).turns
    assert (turn.is_greedy, turn.temperature, turn.reward) == (True, 0.0, None)


def test_turns_of_a_newer_build_keep_what_this_one_knows():
    newer = wire(make_trajectory(), turns=[[4, 8, "stop", 1.0, 1.0, 0, None, 0.0, "new"]])
    assert decode(newer, Trajectory).turns == (Turn(4, 8, "stop"),)


def test_bad_message_within_a_message_is_refused_by_its_path():
    batch = TrajectoryBatch(trajectories=(make_trajectory(),))
    body = msgpack.unpackb(encode(batch))[2]["trajectories"]
    with pytest.raises(
        SchemaError, match=r"trajectories\.trajectories: trajectory\.sample: expected an integer"
    ):
        decode(wire(batch, trajectories=[body[0] | {"sample": None}]), TrajectoryBatch)
    with pytest.raises(SchemaError, match="expected fields, found int"):
        decode(wire(batch, trajectories=[3]), TrajectoryBatch)
    with pytest.raises(SchemaError, match="expected list, found dict"):
        decode(wire(batch, trajectories={}), TrajectoryBatch)


@pytest.mark.parametrize("chunks", [0, -1, 11, 2**62])
def test_blob_of_impossibly_many_chunks_is_refused(chunks: int):
    with pytest.raises(SchemaError, match="10 bytes in"):
        decode(wire(BLOB, size_bytes=10, chunks=chunks), BlobRef)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy_version": 8}, "do not lead there"),
        ({"snapshot_version": 3}, "no delta leads from version 3 to 7"),
        ({"snapshot_version": 7, "deltas": DELTAS[:1]}, "do not lead there"),
        ({"deltas": DELTAS[::-1]}, "a delta to version 7 is followed by one from 4"),
        ({"deltas": (DeltaRef(base_version=7, policy_version=7, blob=BLOB),)}, "not lead to a later version"),
    ],
)
def test_manifest_whose_deltas_lead_nowhere_is_refused(changes, reason):
    with pytest.raises(SchemaError, match=reason):
        decode(encode(dataclasses.replace(POLICY, **changes)), PolicyManifest)


@pytest.mark.parametrize(("version", "deltas"), [(7, 0), (5, 1), (4, 2), (6, None), (3, None)])
def test_manifest_knows_the_deltas_since_a_version(version, deltas):
    found = POLICY.since(version)
    assert (None if found is None else len(found)) == deltas


def test_what_cannot_travel_is_refused_before_it_is_sent():
    for metadata in ({"seen": {1, 2}}, {"seen": np.float32(1)}, {"seen": 2**80}, {"seen": "\ud800"}):
        with pytest.raises(SchemaError, match="cannot encode prompt"):
            encode(Prompt(content="x", metadata=metadata))
    wrong_dtype = dataclasses.replace(make_trajectory(), token_ids=np.arange(8))
    with pytest.raises(SchemaError, match="array is int64"):
        encode(wrong_dtype)


def test_what_is_too_deep_to_be_written_again_is_not_read():
    deep: object = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    fits = decode(wire(CHAT, metadata={"a": deep[0]}), Prompt)
    assert encode(fits)
    with pytest.raises(SchemaError, match="nested more than"):
        decode(wire(CHAT, metadata={"a": deep}), Prompt)


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 10_000 + b"\xc0",  # nested arrays
        b"\x81\xa1a" * 10_000 + b"\xc0",  # nested maps
        b"\xdd\xff\xff\xff\xff" + b"\xc0" * 1000,  # 4 billion items declared
        b"\xdf\xff\xff\xff\xff" + b"\xc0" * 1000,
        b"\xc6\xff\xff\xff\xff" + b"\0" * 1000,  # 4 GiB of bytes declared
        b"\xdb\xff\xff\xff\xff" + b"a" * 1000,
        b"\xdd\x00\x10\x00\x00" * 1000 + b"\xc0" * (2 << 20),  # a thousand lists, a million items each
    ],
)
def test_bombs_are_refused_quickly(data: bytes):
    began = time.monotonic()
    with pytest.raises(SchemaError):
        decode(data, Done)
    assert time.monotonic() - began < 15


def test_mutated_bytes_never_raise_anything_but_schema_errors():
    chance = random.Random(0)
    survivors = 0
    for data in (encode(example) for example in EXAMPLES):
        for _ in range(500):
            survivors += _decodes(_mutated(data, chance))
    assert survivors > 0  # some changes, as of a letter in a name, cannot be seen


def _mutated(data: bytes, chance: random.Random) -> bytes:
    mutated = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(mutated))
        match chance.randrange(4):
            case 0:
                mutated[at] ^= 1 << chance.randrange(8)
            case 1:
                mutated[at] = chance.randrange(256)
            case 2:
                del mutated[at : at + chance.randint(1, 8)]
            case 3:
                mutated[at:at] = chance.randbytes(chance.randint(1, 8))
        mutated = mutated or bytearray(b"\x93")
    return bytes(mutated)


def _decodes(data: bytes) -> bool:
    try:
        message = decode(data, *CLASSES)
    except SchemaError:
        return False
    assert encode(message)
    return True


@pytest.mark.parametrize(
    "name", ["", "12.3", "g00000012", "g00000012.-1", "g12.3", "g000000012.3", "g00000012.03"]
)
def test_reward_for_what_is_no_trajectorys_name_is_refused(name: str):
    with pytest.raises(SchemaError, match=r"names no trajectory: it is written like g00000012\.3"):
        decode(encode(RewardGiven(trajectory_id=name, reward=1.0)), RewardGiven)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e300])
def test_reward_that_is_no_number_for_the_learner_is_refused(reward: float):
    with pytest.raises(SchemaError, match=r"g00000012\.3: reward is"):
        decode(encode(RewardGiven(trajectory_id="g00000012.3", reward=reward)), RewardGiven)


def test_a_message_that_is_refused_still_says_who_made_it():
    nan = dataclasses.replace(make_trajectory(), reward=float("nan"), actor="actor-7")
    with pytest.raises(SchemaError, match="reward is nan") as refused:
        decode(encode(TrajectoryBatch(trajectories=(nan,))), TrajectoryBatch)
    assert (refused.value.kind, refused.value.actor) == ("unreadable", "actor-7")
