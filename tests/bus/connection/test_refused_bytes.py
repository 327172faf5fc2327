"""Bytes that are no message, or one that cannot be, are refused in words and quickly."""

import dataclasses
import random
import time

import msgpack
import numpy as np
import pytest

from bus.codec import MAX_DEPTH, decode, encode
from bus.connection.answers import Refused
from bus.errors import SchemaError
from bus.messages import BlobRef, DeltaRef, PolicyManifest, Prompt, RewardGiven
from bus.requests import Done, Waiting
from bus.trajectory import KeptTurn, Trajectory, TrajectoryBatch, refuse_impossible_logprobs
from tests.bus.example_messages import BLOB, CHAT, CLASSES, DELTAS, EXAMPLES, POLICY, wire
from tests.factories import make_trajectory, make_turn


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
    "older_kv": b"",
    "reward_source": "",
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
        ({"turns": [[4, 8, "stop", 0.009]]}, "tokens of a greedy turn"),
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
