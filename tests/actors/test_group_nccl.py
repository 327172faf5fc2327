"""The learner's broadcast over NCCL, from one GPU to another (`pytest -m multi_gpu tests/actors`)."""

import asyncio
import json
import sys

import pytest
import torch

from actors.engines.published import Published
from bus.messages import BlobRef, PolicyManifest
from learner.broadcast import Broadcaster
from learner.host_copy import host_tensors
from storage.weights import Weights

pytestmark = [pytest.mark.nats, pytest.mark.multi_gpu, pytest.mark.timeout(300)]
BLOB = BlobRef(subject="none", chunks=1, size_bytes=1, digest="")
ENGINE = """
import json, sys, torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

order = json.loads(sys.stdin.readline())
torch.cuda.set_device(1)
store = dist.TCPStore(order["host"], order["port"], 2, is_master=False)
group, _ = c10d._new_process_group_helper(
    2, 1, [], c10d.Backend("nccl"), dist.PrefixStore(order["group"], store), group_name=order["group"]
)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
print("joined", flush=True)
for line in sys.stdin:
    kinds = [(getattr(torch, dtype), shape) for dtype, shape in json.loads(line)]
    tensors = [torch.empty(shape, dtype=dtype, device="cuda") for dtype, shape in kinds]
    for work in [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in tensors]:
        work.wait()
    print(json.dumps([tensor.double().sum().item() for tensor in tensors]), flush=True)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_weights_reach_another_gpu_version_after_version(bus):
    announced = {}
    broadcaster = Broadcaster(bus, lambda: announced.get("weights"), incarnation="one", timeout_s=60.0)
    await broadcaster.start()
    engine = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENGINE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    group = ""
    try:
        for version in range(3):
            tensors = {"a": torch.full((4096, 1024), version + 0.5).bfloat16(), "b": torch.arange(7.0)}
            announced["weights"] = Weights.of(version, host_tensors(tensors))
            manifest = PolicyManifest(
                policy_version=version, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl"
            )
            published = Published(bus, manifest, None)
            [bucket] = offer = await published.offered(group, ranks=1, device="cuda")
            assert bucket.backend == "nccl"
            if not group:
                group = bucket.group
                where = {"host": bucket.host, "port": bucket.port, "group": group}
                engine.stdin.write(json.dumps(where).encode() + b"\n")
                assert await asyncio.wait_for(engine.stdout.readline(), 120.0) == b"joined\n"
            await published.begin(offer)
            kinds = list(zip(bucket.dtypes, bucket.shapes, strict=True))
            engine.stdin.write(json.dumps(kinds).encode() + b"\n")
            received = json.loads(await asyncio.wait_for(engine.stdout.readline(), 120.0))
            assert bucket.group == group
            assert received == [tensors[name].double().sum().item() for name in bucket.names]
    finally:
        engine.kill()
        await engine.communicate()
        await broadcaster.close()
