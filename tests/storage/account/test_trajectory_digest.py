"""The digest of a trajectory's content is the same wherever it is, and of no other content."""

from dataclasses import fields, replace

import numpy as np
import pytest

from bus.codec import decode, encode
from bus.images import PlacedImage
from bus.trajectory import Parent, Trajectory, TrajectoryBatch, Turn
from storage.account.records import APART, content_digest
from tests.factories import make_trajectory

FULL = replace(
    make_trajectory(7, 1),
    turns=(Turn(4, 6, "stop", temperature=1, reward=1), Turn(6, 8, "length", 0.7, top_k=5, min_p=0.1)),
    parent=Parent("g00000007.0", 3),
    reward_components={"format": 1, "length": -0.5},
    metadata={"source": "x", "nested": [1, None, {"a": 0.1}]},
    run="3f",
)
CHANGES = {
    "trajectory_id": "g00000007.0",
    "group_id": "g00000008",
    "lease_id": 8,
    "sample": 0,
    "group_size": 3,
    "rollout": 0,
    "token_ids": FULL.token_ids[::-1].copy(),
    "loss_mask": np.roll(FULL.loss_mask, 1),
    "behaviour_logprobs": np.nextafter(FULL.behaviour_logprobs, np.float32(-9)),
    "policy_versions": FULL.policy_versions + np.int32(1),
    "turns": FULL.turns[:1],
    "end": "length",
    "agent": "critic",
    "policy": "other",
    "parent": Parent("g00000007.0", 2),
    "trainable": False,
    "reward_components": {"format": 1, "length": 0.5},
    "actor": "another",
    "metadata": {"source": "y"},
    "run": "40",
    "routed_experts": b"\x01",
    "moe_layers": 1,
    "experts_per_token": 1,
    "kept_counts": b"\x01",
    "kept_tokens": b"\x01",
    "images": (PlacedImage("ab", 0, 1, 1, b"data"),),
    "older_kv": b"\x01",
}


def test_a_digest_is_the_same_before_and_after_the_wire():
    """Also where a program gave whole numbers for fractions, which decoding makes floats."""
    [received] = decode(encode(TrajectoryBatch.of([FULL])), TrajectoryBatch).trajectories
    assert isinstance(received.turns[0].temperature, float)
    assert content_digest(received) == content_digest(FULL)


def test_every_field_but_the_reward_changes_the_digest():
    assert {field.name for field in fields(Trajectory)} == CHANGES.keys() | APART
    digests = {content_digest(replace(FULL, **{name: value})) for name, value in CHANGES.items()}
    assert len(digests) == len(CHANGES)
    assert content_digest(FULL) not in digests
    assert content_digest(
        replace(FULL, reward=-1.0, reward_due=True, reward_source="judge")
    ) == content_digest(FULL)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"turns": (Turn(0, 4, "stop"), Turn(4, 8, "stop"))}, {"turns": (Turn(0, 8, "stop"),)}),
        ({"agent": "ab", "policy": "c"}, {"agent": "a", "policy": "bc"}),
        ({"actor": "x", "run": ""}, {"actor": "", "run": "x"}),
    ],
    ids=str,
)
def test_contents_that_read_alike_in_a_row_differ(one, other):
    assert content_digest(replace(FULL, **one)) != content_digest(replace(FULL, **other))


def test_arrays_of_equal_bytes_do_not_stand_for_each_other():
    tokens = FULL.behaviour_logprobs.view(np.int32).copy()
    swapped = replace(FULL, token_ids=tokens, behaviour_logprobs=FULL.token_ids.view(np.float32).copy())
    same = replace(FULL, token_ids=FULL.policy_versions, policy_versions=FULL.token_ids)
    assert len({content_digest(one) for one in (FULL, swapped, same)}) == 3


def test_bytes_of_an_image_count_by_its_digest_wherever_they_travel():
    whole = replace(FULL, images=(PlacedImage("ab", 0, 1, 1, b"data"),))
    bare = replace(FULL, images=(PlacedImage("ab", 0, 1, 1),))
    other = replace(FULL, images=(PlacedImage("cd", 0, 1, 1, b"data"),))
    assert content_digest(whole) == content_digest(bare) != content_digest(other)
