"""What the shard gets of an episode are the bytes that were checked."""

from dataclasses import replace

import numpy as np
import pytest

from actors.episodes.episode import AgentTrajectory, Episode, FailedEpisode
from actors.rollouts import group as group_module
from actors.rollouts import leases
from actors.rollouts.group import KEPT_BYTES, Group
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import decode, encode
from bus.images import PlacedImage, image_digest
from bus.streams.publish import Publisher
from bus.trajectory import TrajectoryBatch, Turn, joined_batches
from tests.actors.rollouts.whole_actor import GROUPS, Actor, answer_with
from tests.factories import make_lease


def part(length: int, number: int = 0, **changed: object) -> AgentTrajectory:
    return replace(
        AgentTrajectory(
            token_ids=np.arange(length, dtype=np.int32),
            loss_mask=np.arange(length) > 0,
            behaviour_logprobs=np.full(length, -0.5, np.float32),
            policy_versions=np.full(length, 4, np.int32),
            turns=(Turn(1, length, "stop"),),
            reward=float(number),
            end="completed",
            metadata={"number": number},
        ),
        **changed,
    )


def group_of(samples: int, *, each: int | None = 1) -> Group:
    return Group(make_lease(3, samples=samples, policy_version=4), each, "tester", 4)


@pytest.mark.parametrize(("samples", "each"), [(1, 1), (3, 2), (15, 1), (16, 1), (40, 2)])
async def test_the_bytes_of_a_group_are_those_of_all_its_trajectories(samples, each):
    group = group_of(samples, each=each)
    for sample in reversed(range(samples)):
        group.add(sample, Episode(tuple(part(3 + sample, sample, strand=n) for n in range(each))))
    expected = encode(group._batch(list(range(samples))))
    [(name, batch, data)] = group.unsent()
    assert (name, data, encode(batch)) == (group.lease.group_id, expected, expected)


async def test_siblings_that_are_sent_ahead_have_the_bytes_of_their_own_message():
    group = group_of(3)
    for sample in (2, 0):
        group.add(sample, Episode((part(5, sample),)))
    expected = [("g00000003.0", encode(group._batch([0]))), ("g00000003.2", encode(group._batch([2])))]
    assert [(name, data) for name, _, data in group.unsent()] == expected
    group.add(1, Episode((part(5, 1),)))
    assert [(name, data) for name, _, data in group.unsent()] == [("g00000003.1", encode(group._batch([1])))]


async def test_an_episode_that_gets_another_reward_is_sent_with_that():
    group = group_of(2)
    for reward in (1, 7):
        for sample in range(2):
            group.add(sample, Episode((part(5, reward),)))
    [(_, _, data)] = group.unsent()
    assert [one.reward for one in decode(data, TrajectoryBatch).trajectories] == [7.0, 7.0]


async def test_what_an_environment_changes_after_its_episode_was_checked_is_not_sent():
    group, recorded = group_of(1), part(5)
    group.add(0, Episode((recorded,)))
    recorded.behaviour_logprobs[2] = np.nan
    [(_, batch, data)] = group.unsent()
    [sent] = decode(data, TrajectoryBatch).trajectories
    assert sent.behaviour_logprobs.tolist() == batch.trajectories[0].behaviour_logprobs.tolist() == [-0.5] * 5


IMAGE = PlacedImage(image_digest(b"png"), 1, 2, 2, b"png")
SHOWS_IMAGE = part(9, images=(IMAGE,), loss_mask=np.arange(9) > 5, turns=(Turn(6, 9, "stop"),))
ENCODED_AGAIN = {
    "a sibling failed": (1, Episode((part(5),)), FailedEpisode("timeout", "too slow")),
    "a sibling failed after it was checked": (
        1, Episode((part(5),)), Episode((part(5),)), FailedEpisode("timeout", "too slow"),
    ),
    "one is large": (1, Episode((part(5),)), Episode((part(KEPT_BYTES // 4),))),
    "images are shared": (
        1, *[Episode((SHOWS_IMAGE,))] * 2
    ),
    "places are not known before": (None, Episode((part(5),)), Episode((part(5), part(6, strand=1)))),
}  # fmt: skip


@pytest.mark.parametrize("case", ENCODED_AGAIN)
async def test_a_group_is_encoded_as_a_whole_where(case):
    each, *outcomes = ENCODED_AGAIN[case]
    group = group_of(2, each=each)
    for number, outcome in enumerate(outcomes):
        group.add(min(number, 1), outcome)
    [(_, batch, data)] = group.unsent()
    assert data is None
    assert len({one.group_size for one in batch.trajectories}) == 1
    assert encode(batch) == encode(group._batch([0, 1]))


@pytest.mark.nats
async def test_an_actor_encodes_each_trajectory_once(bus, monkeypatch):
    encoded, published, publish = [], [], Publisher.publish

    def noted(message):
        encoded.append(encode(message))
        return encoded[-1]

    async def published_too(self, subject, data, **given):
        published.append(data)
        return await publish(self, subject, data, **given)

    engine = ScriptedEngine(answer_with("0"), policy_version=4)
    await engine.start()
    actor = Actor(bus, engine)
    for module in (group_module, leases):
        monkeypatch.setattr(module, "encode", noted)
    monkeypatch.setattr(Publisher, "publish", published_too)
    await actor.roll_out(make_lease(0, samples=3, policy_version=4), result=GROUPS)
    await engine.close()
    [_, sent] = published  # the lease, and the group
    assert len(encoded) == 3
    assert sent == joined_batches(
        sorted(encoded, key=lambda one: decode(one, TrajectoryBatch).trajectories[0].sample), each=1
    )
