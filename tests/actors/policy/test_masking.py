"""Tokens of older versions stay context, but are not trained on."""

from dataclasses import replace

import numpy as np
import pytest

from actors.engines.base import Generation, Sampling
from actors.episodes.episode import AgentTrajectory, Episode
from actors.policy.policy import Policy
from actors.policy.version_masking import Masking, without_older_kv, without_older_versions
from actors.rollouts.group import Group
from benchmarks.scripted_engine import ScriptedEngine
from bus.trajectory import Turn
from tests.factories import make_lease

VERSIONS = [-1, 3, 3, 4, -1, 5, 6]


def trajectory() -> AgentTrajectory:
    versions = np.array(VERSIONS, np.int32)
    return AgentTrajectory(
        token_ids=np.arange(len(versions), dtype=np.int32),
        loss_mask=versions >= 0,
        behaviour_logprobs=np.where(versions >= 0, np.float32(-0.5), np.float32(0)),
        policy_versions=versions,
        turns=(Turn(1, 4, "stop"), Turn(5, 7, "stop")),
        reward=1.0,
        end="completed",
    )


@pytest.mark.parametrize(
    ("max_lag", "left", "masked"),
    [(0, [6], [3, 4, 5]), (1, [5, 6], [3, 4]), (2, [4, 5, 6], [3]), (3, [3, 3, 4, 5, 6], [])],
)
def test_tokens_that_lag_by_more_than_the_bound_are_masked_and_counted(max_lag, left, masked):
    found = without_older_versions(trajectory(), max_lag)
    assert found.policy_versions[found.loss_mask].tolist() == left
    assert found.metadata.get("masked_versions", []) == masked
    assert found.metadata.get("masked_tokens", 0) == 5 - len(left)
    outside = ~found.loss_mask
    assert set(found.policy_versions[outside].tolist()) == {-1}
    assert set(found.behaviour_logprobs[outside].tolist()) == {0.0}
    assert found.token_ids.tolist() == trajectory().token_ids.tolist()
    assert found.oldest_version == min(left)


def test_tokens_over_keys_of_older_weights_are_masked_and_counted():
    kv_versions = np.array([-1, 3, 3, 3, -1, 5, 4], np.int32)
    found = without_older_kv(replace(trajectory(), kv_versions=kv_versions))
    assert found.loss_mask.tolist() == [False, True, True, False, False, True, False]
    assert found.policy_versions.tolist() == [-1, 3, 3, -1, -1, 5, -1]
    assert found.kv_versions.tolist() == found.policy_versions.tolist()
    assert found.metadata == {"masked_older_kv_tokens": 2}
    assert found.trainable
    assert without_older_kv(trajectory()).loss_mask.tolist() == trajectory().loss_mask.tolist()


def test_a_trajectory_of_such_tokens_alone_is_context():
    before = np.array([-1, 2, 2, 2, -1, 2, 2], np.int32)
    masked = Masking(max_lag=0, older_kv=True).applied(replace(trajectory(), kv_versions=before))
    assert not masked.loss_mask.any()
    assert not masked.trainable, "there is nothing to train on, which a message of a trained one would need"


class TwoVersions(ScriptedEngine):
    """Draws the first half of its tokens with version 1, the rest with 2, over keys and values of 1."""

    async def generate(self, request):
        found = await super().generate(request)
        versions = np.where(np.arange(len(found.token_ids)) < 2, 1, 2).astype(np.int32)
        return Generation(found.token_ids, found.logprobs, versions, "stop").over_kv_of(1)


async def test_a_policy_masks_as_configured_and_the_message_says_so(tokenizer):
    engine = TwoVersions(lambda _: tokenizer.encode("abc<|end|>"))
    masked_versions = {"masked_tokens": 2, "masked_versions": [1]}
    for masking, mask, expected in [
        (Masking(), [True] * 4, {}),
        (Masking(max_lag=0), [False, False, True, True], masked_versions),
        (Masking(older_kv=True), [True, True, False, False], {"masked_older_kv_tokens": 2}),
    ]:
        policy = Policy(engine, tokenizer, Sampling(), masking=masking)
        await policy.fresh("r").generate([10, 11])
        rollout = policy.fresh("r")
        await rollout.generate([10, 11])
        [recorded] = rollout.trajectories(1.0)
        assert recorded.loss_mask.tolist() == [False, False, *mask]
        group = Group(make_lease(0, samples=1), 1, "actor")
        group.add(0, Episode((recorded,)))
        [(_, batch, _)] = group.unsent()
        [message] = batch.trajectories
        message.check()
        assert message.metadata == expected
        older = message.kv_versions is not None and message.kv_versions != message.policy_versions
        assert np.flatnonzero(older).tolist() == ([] if masking.older_kv else [4, 5])
