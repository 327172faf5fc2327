"""Which published version an opponent is, and its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from actors.engines.base import Engine
from actors.settings.opponents import OpponentConfig
from actors.weights.follow import fetch_state
from bus.errors import BusError, ConfigError, StorageError
from bus.messages import PolicyManifest
from storage.model_files.finite_weights import refuse_not_finite
from storage.model_files.model_reading import AGAIN, refusing
from storage.model_files.weight_files import weight_files
from storage.weights.blob_sources import BlobSource

if TYPE_CHECKING:
    import torch

log = structlog.get_logger()


def manifest_at(manifest: PolicyManifest, policy_version: int) -> PolicyManifest | None:
    """Return what announces an earlier version of the same learner; None if nothing names its weights. They
    are where the version is kept, or lies on the way from the snapshot to the version announced."""
    if policy_version == manifest.policy_version:
        return manifest
    for kept in manifest.kept:
        if kept.policy_version == policy_version:
            return replace(
                manifest, policy_version=policy_version, snapshot=kept.snapshot, snapshot_rest=kept.rest,
                snapshot_version=None, deltas=(), probe=None,
            )  # fmt: skip
    before = [delta for delta in manifest.deltas if delta.policy_version <= policy_version]
    reaches = manifest.snapshot_at == policy_version or any(
        d.policy_version == policy_version for d in before
    )
    if not reaches or policy_version < manifest.snapshot_at:
        return None
    tail = tuple(delta for delta in before if delta.base_version >= manifest.snapshot_at)
    return replace(
        manifest,
        policy_version=policy_version,
        snapshot_version=manifest.snapshot_at,
        deltas=tail,
        probe=None,
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Weights of an earlier version that the opponent may become."""

    policy_version: int
    state: "Mapping[str, torch.Tensor]"


class PublishedWeights:
    """Gives the engine of one opponent the weights of the version that it is to be."""

    def __init__(self, name: str, config: OpponentConfig, engine: Engine, blobs: BlobSource) -> None:
        self._name = name
        self._config = config
        self._engine = engine
        self._blobs = blobs
        self._candidates: list[_Candidate] = []
        """Versions to become, the oldest first; the first is what it is."""
        self._loaded: int | None = None

    async def follow(self, manifest: PolicyManifest) -> bool:
        """Load what the announcement of a version asks for; return False where it could not be fetched now.
        Raises `ConfigError` for a version that is gone for good, and EngineError."""
        try:
            if self._config.pinned is not None:
                await self._pin(manifest, self._config.pinned)
            elif self._config.lag is not None:
                await self._lag(manifest, self._config.lag)
        except (BusError, StorageError) as error:  # the next announcement may name other bytes
            log.warning("opponent_not_fetched", opponent=self._name, reason=str(error))
            return False
        return True

    async def _pin(self, manifest: PolicyManifest, version: int) -> None:
        if self._loaded is not None or manifest.policy_version < version:
            return
        announced = manifest_at(manifest, version)
        if announced is None and version in manifest.keeping:  # announced again once the file is there
            return
        if announced is None:
            raise ConfigError(
                f"actors.opponents.{self._name}.version={version}: the run is at version "
                f"{manifest.policy_version}, and that one is not on the bus any more: have the learner keep "
                f"it with learner.publication.keep_versions=[{version}] from the start, or give a directory "
                f"of its weights as actors.opponents.{self._name}.path"
            )
        await self._load(_Candidate(version, await fetch_state(self._blobs, announced)))

    async def _lag(self, manifest: PolicyManifest, lag: int) -> None:
        """Fetch the newest version when one is due, and become the newest of those that are old enough."""
        newest = manifest.policy_version
        first = min(manifest.trains_from, newest)
        goal = max(first, newest - lag)
        # Earlier versions are not warmed up, since they lose anyway. Versions beyond the announced
        # one are of steps that a resumed learner has taken back.
        self._candidates = [c for c in self._candidates if first <= c.policy_version <= newest]
        if not self._candidates:
            await self._fetch(manifest, max(goal, manifest.snapshot_at))
        if newest - self._candidates[-1].policy_version >= self._config.refresh_every:
            await self._fetch(manifest, newest)
        old_enough = [c for c in self._candidates if c.policy_version <= goal] or self._candidates[:1]
        chosen = old_enough[-1]
        self._candidates = [c for c in self._candidates if c.policy_version >= chosen.policy_version]
        if chosen.policy_version != self._loaded:
            await self._load(chosen)

    async def _fetch(self, manifest: PolicyManifest, version: int) -> None:
        announced = manifest_at(manifest, version) or manifest
        state = await fetch_state(self._blobs, announced)
        self._candidates.append(_Candidate(announced.policy_version, state))

    async def _load(self, weights: _Candidate) -> None:
        await self._engine.load_weights(weights.state, weights.policy_version)
        self._loaded = weights.policy_version
        log.info("opponent_is", opponent=self._name, policy_version=weights.policy_version)


def state_of_files(directory: Path) -> "Mapping[str, torch.Tensor]":
    """Return the tensors of a model directory. Raises `ConfigError` for one without safetensors files, and
    for weights that are not finite."""
    from safetensors.torch import load_file

    files = [directory / name for name in weight_files(directory)]
    with refusing(f"cannot read the weights in {directory}", AGAIN):
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    refuse_not_finite(found.items(), directory)
    return found
