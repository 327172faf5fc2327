"""An engine takes from a group only what the learner has signed, digest by digest, on a secured bus."""

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import structlog
import torch

from actors.engines.announced_version import Published
from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.in_server import sluice_digests
from actors.engines.sglang.in_server.sluice_digests import EXPECT
from actors.settings.engines import SglangEngineConfig
from bus.codec import encode
from bus.errors import BusError
from bus.messages import BlobRef, PolicyManifest
from bus.requests import Done
from bus.weight_requests import BroadcastWanted, OfferedBucket, SignedOffer, WeightOffer
from learner.host_memory.copies import host_tensors
from learner.publication.broadcast import Broadcaster
from storage.weights.tensors import Weights
from tests.actors.sglang_stand_in import StandIn
from tests.bus.security.secured import by_role, make_streams, secured_bus

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
BLOB = BlobRef(subject="none", chunks=1, size_bytes=1, digest="0" * 32)
BUCKET = OfferedBucket(
    group="forged", host="10.6.6.6", port=1, backend="gloo", first_rank=1,
    world_size=2,
    policy_version=9,
    names=("w",), dtypes=("float32",), shapes=((1,),), digests=(bytes(32),),
)  # fmt: skip
RANK = """
import sys, torch
from datetime import timedelta
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import sluice_digests
class Model(torch.nn.Module):
    def load_weights(self, weights):
        print("loaded")
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
model, tensor = Model(), torch.ones(3)
sluice_digests.expect_1(model, [("digests", torch.tensor(list(sys.argv[4].encode()), dtype=torch.uint8))])
try:
    model.load_weights([("w", tensor + rank)])  # rank 1 has another one
except ValueError as error:
    print(error)
"""


def state(version):
    return {"half": torch.arange(7, dtype=torch.bfloat16) + version, "last": torch.arange(32.0) - version}


def published_on(bus, version, fetched=None):
    async def fetch(manifest):
        fetched.append(manifest.policy_version)
        return state(manifest.policy_version)

    manifest = PolicyManifest(
        policy_version=version, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl"
    )
    return Published(bus, manifest, fetch)


@pytest.fixture
async def as_role(tmp_path):
    async with secured_bus(tmp_path, "mine") as (secure, _):
        await make_streams(by_role(secure))
        yield by_role(secure)


@pytest.mark.slow
async def test_a_server_takes_no_broadcast_tensor_of_another_digest(as_role, tmp_path):
    model, fetched, announced = tmp_path / "model", [], {}
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    async with AsyncExitStack() as stack:
        learner, actor = [await stack.enter_async_context(as_role(role)) for role in ("learner", "actor")]
        broadcaster = Broadcaster(learner, lambda: announced["weights"], incarnation="one", timeout_s=60.0)
        await broadcaster.start()
        await learner.client.flush()
        stack.push_async_callback(broadcaster.close)

        async def serving(loaders):
            server = StandIn()
            server.custom_weight_loader = loaders
            await server.start()
            stack.push_async_callback(server.close)
            config = SglangEngineConfig(url=server.url, update="group", weights_directory=tmp_path / "w")
            engine = SglangEngine(model, config, tmp_path / "unused.log")
            await engine.start()
            stack.push_async_callback(engine.close)
            return engine, server

        async def load(engine, version):
            announced["weights"] = Weights.of(version, host_tensors(state(version)))
            await asyncio.wait_for(engine.load_published(published_on(actor, version, fetched)), 60.0)
            assert engine.policy_version == version

        engine, server = await serving([EXPECT])
        await load(engine, 0)
        assert all(torch.equal(server.received[name], tensor) for name, tensor in state(0).items())
        assert fetched == []
        assert "load_weights" not in vars(server.model)
        server.altered = "last"
        with structlog.testing.capture_logs() as logs:
            await load(engine, 1)
        assert fetched == [1]
        assert "what came is not what the learner offered: last, whose SHA-256 is" in str(logs)
        assert all(torch.equal(server.received[name], tensor) for name, tensor in state(0).items())
        assert all(torch.equal(server.weights[name], tensor) for name, tensor in state(1).items())
        assert "load_weights" not in vars(server.model)
        unable, plain = await serving([])
        await load(unable, 2)
        assert fetched == [1, 2]
        assert "init_weights_update_group" not in plain.said


async def test_an_offer_of_another_role_or_for_another_request_is_refused_by_name(as_role):
    async with as_role("operator") as stranger, as_role("learner") as learner, as_role("actor") as actor:
        subject = actor.subject("broadcast", "offer")
        offers = {
            "broadcast.offer is not signed": lambda offer: encode(offer),
            "broadcast.offer is signed by actor, which may not write it": lambda offer: actor.sealed(
                subject, offer
            ),
            "version 7 is not one for this request": lambda _: learner.sealed(
                subject, WeightOffer(nonce="of another", buckets=(BUCKET,))
            ),
        }
        sealing = iter(offers.values())

        async def answer(wanted):
            offer = WeightOffer(nonce=wanted.nonce, buckets=(BUCKET,))
            return [SignedOffer(record=next(sealing)(offer)), Done()]

        await stranger.serve(stranger.subject("broadcast", "wanted"), BroadcastWanted, answer)
        await stranger.client.flush()
        for reason in offers:
            with pytest.raises(BusError, match=reason):
                await published_on(actor, 7).offered("", ranks=1, device="cpu", timeout_s=30.0)
        assert actor.signatures.set_aside == {"broadcast.offer": 2}


@pytest.mark.slow
@pytest.mark.parametrize("hashed", [True, False])
async def test_what_is_offered_has_digests_unless_they_are_turned_off(as_role, hashed):
    weights = Weights.of(0, host_tensors(state(0)))
    async with as_role("learner") as learner, as_role("actor") as actor:
        broadcaster = Broadcaster(learner, lambda: weights, incarnation="one", timeout_s=60.0, hashed=hashed)
        await broadcaster.start()
        await learner.client.flush()
        published = published_on(actor, 0)
        [bucket] = await published.offered("", ranks=1, device="cpu", timeout_s=60.0)
        await broadcaster.close()
    assert len(bucket.digests) == (2 if hashed else 0)


@pytest.mark.slow
def test_all_ranks_of_a_server_refuse_what_one_of_them_does_not_get_as_offered(tmp_path):
    digests = json.dumps({"w": sluice_digests._sha256(torch.ones(3))})
    directory = str(Path(sluice_digests.__file__).parent)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, directory, str(rank), str(tmp_path / "store"), digests],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert said[0] == said[1]
    assert said[0].startswith("what came is not what the learner offered: w, whose SHA-256 is")
