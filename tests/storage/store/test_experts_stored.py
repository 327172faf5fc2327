"""The experts of a trajectory's tokens, from the bus to the learner: stored, merged, read, refused."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from bus.codec import encode
from bus.requests import GroupRef
from bus.server.nats_server import MAX_PAYLOAD
from bus.streams.publish import Publisher
from bus.trajectory import Trajectory, TrajectoryBatch
from storage.client.reader import ReplayReader
from storage.store.replay import ReplayStore
from storage.store.segments import Segment, merge_segments, write_segment
from tests.factories import make_trajectory
from tests.storage.serving import dead_letters, has, make_shard, running, send, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


def routed(lease_id: int, sample: int, *, tokens: int = 8, layers: int = 3) -> Trajectory:
    experts = np.random.default_rng([lease_id, sample]).integers(0, 128, (tokens - 1, layers, 2), np.uint8)
    return replace(
        make_trajectory(lease_id, sample, tokens=tokens),
        routed_experts=experts.tobytes(),
        moe_layers=layers,
        experts_per_token=2,
    )


def test_segments_keep_experts_beside_trajectories_without(tmp_path):
    written = [routed(0, 0), make_trajectory(0, 1), routed(1, 0, tokens=20, layers=1)]
    write_segment(tmp_path / "a", written[:2])
    write_segment(tmp_path / "b", written[2:])
    merge_segments(tmp_path / "merged", [tmp_path / "a", tmp_path / "b"])
    with closing(Segment(tmp_path / "merged")) as segment:
        found = [segment.trajectory(row) for row in range(3)]
    assert found[1].experts is None
    for before, after in zip(written, found, strict=True):
        assert (after.routed_experts, after.moe_layers) == (before.routed_experts, before.moe_layers)
    assert found[2].experts.shape == (19, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("read", [pytest.param("auto", marks=pytest.mark.slow), "bus"])
async def test_the_learner_reads_more_experts_than_one_message_carries(bus, tmp_path, read):
    long = 60_000
    siblings = [routed(0, sample, tokens=long, layers=80) for sample in range(2)]
    assert len(siblings[0].routed_experts) > MAX_PAYLOAD
    with closing(ReplayStore.open(tmp_path / "replay")) as store:
        async with running(make_shard(bus, store, 0).run):
            data = encode(TrajectoryBatch(trajectories=tuple(siblings)))
            await Publisher(bus).publish(bus.subject("trajectories", 0), data, message_id="group")
            await until(lambda: store.completed == [0])
            reader = ReplayReader(bus, "a", read=read)
            [found] = await reader.fetch((GroupRef(lease_id=0, shard=0),))
            assert reader.read["mapped" if read == "auto" else "bus"] == 2
            for before, after in zip(siblings, found, strict=True):
                np.testing.assert_array_equal(after.experts, before.experts)
                assert after.experts.shape == (long - 1, 80, 2)
            reader.close()


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize(
    "changes",
    [
        {"routed_experts": bytes(41)},
        {"routed_experts": b""},
        {"moe_layers": 4},
        {"moe_layers": 0},
        {"moe_layers": -3, "experts_per_token": -2},
    ],
)
async def test_experts_that_do_not_fit_the_tokens_are_set_aside(bus, tmp_path, changes):
    with closing(ReplayStore.open(tmp_path / "replay")) as store:
        async with running(make_shard(bus, store, 0).run):
            await send(bus, replace(routed(0, 0), **changes), shard=0)
            await send(bus, routed(2, 0), routed(2, 1), shard=0)
            await until(lambda: store.completed == [2])
            await has(bus, "TRAJECTORIES", 0)
    [letter] = await dead_letters(bus)
    assert "routed experts for 8 tokens" in letter.reason
    assert letter.actor == "test"
