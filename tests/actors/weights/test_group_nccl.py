"""The learner's broadcast over NCCL, from one GPU to another (`pytest -m multi_gpu tests/actors`)."""

import asyncio
import hashlib
import json
import os
import sys

import pytest
import structlog.testing
import torch

from actors.engines.announced_version import Published
from bus.messages import BlobRef, PolicyManifest
from learner.host_memory.copies import host_tensors
from learner.publication.broadcast import AS_SGLANG, Broadcaster
from storage.weights.tensors import Weights

pytestmark = [pytest.mark.nats, pytest.mark.multi_gpu, pytest.mark.timeout(300)]
BLOB = BlobRef(subject="none", chunks=1, size_bytes=1, digest="")
ENGINE = """
import hashlib, json, sys, torch
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

order = json.loads(sys.stdin.readline())
torch.cuda.set_device(1)
store = dist.TCPStore(order["host"], order["port"], 2, is_master=False)
group, _ = c10d._new_process_group_helper(
    2, 1, [], c10d.Backend("nccl"), dist.PrefixStore(order["group"], store), group_name=order["group"],
    timeout=timedelta(seconds=60),
)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
print("joined", flush=True)
for line in sys.stdin:
    kinds = [(getattr(torch, dtype), shape) for dtype, shape in json.loads(line)]
    tensors = [torch.empty(shape, dtype=dtype, device="cuda") for dtype, shape in kinds]
    for work in [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in tensors]:
        work.wait()
    raw = [tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    print(json.dumps([hashlib.sha256(data).hexdigest() for data in raw]), flush=True)
"""
BUCKET_BYTES = 1 << 20


def state(version):
    """More buckets than have room on the device at once; a tensor that takes all of it comes in between."""
    small = {f"small {n}": torch.arange(n * 1000, n * 1000 + 99_991) + version for n in range(9)}
    large = {"large": torch.randn(4096, 1024, generator=torch.Generator().manual_seed(version)).bfloat16()}
    return {"first": torch.tensor(version + 0.5), **small, **large, "odd": torch.arange(7.0), **twice(small)}


def twice(state):
    return {f"{name} again": -tensor for name, tensor in state.items()}


def digest(tensor):
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("device_bytes", [0, 5 * BUCKET_BYTES, 1 << 40], ids=["none", "some", "all"])
async def test_weights_reach_another_gpu_version_after_version(bus, monkeypatch, device_bytes):
    monkeypatch.setattr("learner.publication.shared_copy.BUCKET_BYTES", BUCKET_BYTES)
    announced, memories = {}, []
    broadcaster = Broadcaster(
        bus, lambda: announced.get("weights"),
        incarnation="one", timeout_s=60.0, threads=2, device_bytes=device_bytes,
    )  # fmt: skip
    await broadcaster.start()
    engine = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENGINE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env=os.environ | AS_SGLANG,
    )  # fmt: skip
    group = ""
    try:
        with structlog.testing.capture_logs() as logs:
            for version in range(5):
                tensors = state(version)
                announced["weights"] = Weights.of(version, host_tensors(tensors))
                manifest = PolicyManifest(
                    policy_version=version, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl"
                )
                published = Published(bus, manifest, None)
                offer = await published.offered(group, ranks=1, device="cuda")
                assert {bucket.backend for bucket in offer} == {"nccl"}
                if not group:
                    group = offer[0].group
                    where = {"host": offer[0].host, "port": offer[0].port, "group": group}
                    engine.stdin.write(json.dumps(where).encode() + b"\n")
                    async with published.in_group(offer):
                        assert await asyncio.wait_for(engine.stdout.readline(), 120.0) == b"joined\n"
                received = []
                async with published.in_group(offer):
                    await published.begin(offer)
                    for bucket in offer:
                        kinds = list(zip(bucket.dtypes, bucket.shapes, strict=True))
                        engine.stdin.write(json.dumps(kinds).encode() + b"\n")
                        received += json.loads(await asyncio.wait_for(engine.stdout.readline(), 120.0))
                    await published.ended(offer, 60.0)
                memories.append(broadcaster._newest.memory.number)
                assert {bucket.group for bucket in offer} == {group}
                assert received == [digest(tensors[name]) for bucket in offer for name in bucket.names]
        assert len(set(memories)) <= 2
        assert not [line for line in logs if line["event"] == "weights_are_sent_slowly"]
    finally:
        engine.kill()
        await engine.communicate()
        await broadcaster.close()
