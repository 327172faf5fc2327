"""Publish policy versions in the background, while training goes on."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import structlog
import torch
from safetensors.torch import save

from bus.blobs import delete_blob, put_blob
from bus.codec import encode
from bus.connection import Bus
from bus.messages import BlobRef, PolicyManifest
from bus.publish import Publisher
from storage.model_files import bundle

log = structlog.get_logger()


class WeightPublisher:
    """Puts versions on the bus and takes old ones off it."""

    def __init__(self, bus: Bus, *, incarnation: str, dtype: torch.dtype, keep_versions: int) -> None:
        self.latest: PolicyManifest | None = None
        self._bus = bus
        self._publisher = Publisher(bus)
        self._incarnation = incarnation
        self._dtype = dtype
        self._keep = keep_versions
        self._model: BlobRef | None = None
        self._held: OrderedDict[int, PolicyManifest] = OrderedDict()
        self._pinned: set[int] = set()

    async def retire_others(self) -> None:
        """Take the snapshots of the learner before this one off the bus."""
        found = await self._bus.get("policy", PolicyManifest)
        if found is not None and found[0].incarnation != self._incarnation:
            subject = self._bus.subject("weights", found[0].incarnation, ">")
            await self._bus.js.purge_stream(self._bus.topology.stream("WEIGHTS"), subject=subject)

    async def publish_model_files(self, directory: Path) -> None:
        """Config and tokenizer, once; every manifest refers to them."""
        files = await asyncio.to_thread(bundle, directory)
        self._model = await put_blob(self._bus, self._publisher, encode(files), "model")

    async def publish(
        self, state: Mapping[str, torch.Tensor], *, policy_version: int, stage: str, trains_from: int
    ) -> PolicyManifest:
        """Store the snapshot, then announce it; the announcement never precedes the bytes."""
        if self._model is None:
            raise RuntimeError("publish_model_files comes first")
        data = await asyncio.to_thread(self._serialise, state)
        name = (self._incarnation, policy_version)
        snapshot = await put_blob(self._bus, self._publisher, data, *name)
        manifest = PolicyManifest(
            policy_version=policy_version,
            incarnation=self._incarnation,
            snapshot=snapshot,
            model=self._model,
            stage=stage,
            trains_from=trains_from,
        )
        await self.announce(manifest)
        self._held[policy_version] = manifest
        await self._retire()
        return manifest

    async def announce(self, manifest: PolicyManifest) -> None:
        """Make `manifest` the run's policy: a key for those who come later, a notice for those here."""
        self.latest = manifest
        await self._bus.put("policy", manifest)
        await self._bus.notify(self._bus.subject("notice", "policy"), manifest)

    def pin(self, policy_version: int) -> None:
        """Keep a version on the bus until it is unpinned."""
        self._pinned.add(policy_version)

    def unpin(self, policy_version: int) -> None:
        """The version may go when its turn comes."""
        self._pinned.discard(policy_version)

    async def _retire(self) -> None:
        old = list(self._held)[: -self._keep]
        for version in (v for v in old if v not in self._pinned):
            await delete_blob(self._bus, self._held.pop(version).snapshot)

    def _serialise(self, state: Mapping[str, torch.Tensor]) -> bytes:
        data: bytes = save({name: tensor.to(self._dtype).contiguous() for name, tensor in state.items()})
        return data
