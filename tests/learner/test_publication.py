import pytest
import torch

from actors.weights import fetch_model_files, fetch_state
from bus.errors import BusError
from bus.messages import PolicyManifest
from learner.publish import WeightPublisher

pytestmark = pytest.mark.nats
STATE = {"a": torch.arange(300_000, dtype=torch.float32), "b": torch.ones(3, 4)}


@pytest.fixture
async def publisher(bus, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights stay away")
    publisher = WeightPublisher(bus, incarnation="one", dtype=torch.float32, keep_versions=2)
    await publisher.publish_model_files(tmp_path)
    return publisher


async def publish(publisher, version):
    return await publisher.publish(STATE, policy_version=version, stage="rl", trains_from=0)


async def test_what_is_published_arrives_bit_equal(bus, publisher):
    await publish(publisher, 0)
    [manifest, _] = await bus.get("policy", PolicyManifest)
    state = await fetch_state(bus, manifest)
    assert set(state) == set(STATE)
    assert all(state[name].equal(STATE[name]) for name in STATE)


async def test_model_files_travel_without_the_weights(bus, publisher, tmp_path):
    manifest = await publish(publisher, 0)
    directory = await fetch_model_files(bus, manifest.model, tmp_path / "there")
    assert [path.name for path in directory.iterdir()] == ["config.json"]


async def test_old_versions_leave_the_bus_but_pinned_ones_stay(bus, publisher):
    manifests = [await publish(publisher, 0)]
    publisher.pin(0)
    manifests += [await publish(publisher, version) for version in (1, 2, 3)]
    with pytest.raises(BusError, match="not on the bus"):
        await fetch_state(bus, manifests[1])
    for kept in (0, 2, 3):
        assert (await fetch_state(bus, manifests[kept])).keys() == STATE.keys()
    publisher.unpin(0)
    await publish(publisher, 4)
    with pytest.raises(BusError, match="not on the bus"):
        await fetch_state(bus, manifests[0])


async def test_a_new_learner_takes_the_dead_ones_snapshots_off_the_bus(bus, publisher, tmp_path):
    old = await publish(publisher, 7)
    successor = WeightPublisher(bus, incarnation="two", dtype=torch.bfloat16, keep_versions=2)
    await successor.retire_others()
    await successor.publish_model_files(tmp_path)
    new = await publish(successor, 7)
    with pytest.raises(BusError, match="not on the bus"):
        await fetch_state(bus, old)
    assert (await fetch_state(bus, new))["a"].dtype == torch.bfloat16
