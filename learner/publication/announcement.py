"""What is announced of a version, and which stored bytes an announcement needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bus.messages import AdaptedBase, BlobRef, PolicyManifest, Probe
from storage.weights.tensors import Weights


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """What published adapters belong to."""

    described: Callable[[Sequence[BlobRef], str], AdaptedBase]
    """Says what adapters they are, of frozen weights that lie there and have this digest."""
    weights: Callable[[], Weights]
    """Reads this rank's share of the frozen weights as they are published; called when they are to be
    stored."""


class Announcement(NamedTuple):
    """Says what a manifest says besides where the weights lie."""

    policy_version: int
    stage: str
    trains_from: int
    probe: Probe | None = None
    is_trained: bool = True
    ess_fraction: float | None = None


def blobs_of(manifest: PolicyManifest) -> set[BlobRef]:
    """Return all blobs from which somebody makes the version of a manifest, or one that it keeps."""
    kept = (blob for version in manifest.kept for blob in version.blobs)
    base = () if manifest.adapted is None else manifest.adapted.blobs
    deltas = (blob for delta in manifest.deltas for blob in delta.blobs)
    return {*manifest.snapshot_blobs, *deltas, *kept, *base}
