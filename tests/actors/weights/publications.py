"""Publications of a policy, without a learner."""

import torch
from safetensors.torch import save

from bus.messages import PolicyManifest
from bus.streams.blob_store import put_blob
from bus.streams.publish import Publisher


async def publish(bus, version, *, incarnation="one", stage="rl", announce=True, adapted=None):
    snapshot = await put_blob(
        bus, Publisher(bus), save({"weight": torch.full((4,), float(version))}), incarnation, version
    )
    manifest = PolicyManifest(
        policy_version=version, incarnation=incarnation, snapshot=snapshot, model=snapshot, stage=stage,
        adapted=adapted,
    )  # fmt: skip
    if announce:
        await bus.put("policy", manifest)
        await bus.notify(bus.subject("notice", "policy"), manifest)
    return manifest
