"""Settings of how policy versions reach the actors. Loads without torch."""

from pydantic import Field

from bus.config import Config
from storage.weights.transport_config import BusTransport, TransportConfig


class PublicationConfig(Config):
    """How policy versions reach the actors; docs/weights.md says which transport to choose."""

    anchor_every: int = Field(10, ge=1, le=1000)
    """Versions between two whole snapshots, from which late joiners start; what lies between travels as
    deltas. 1 sends every version whole."""

    keep: int = Field(8, ge=2)
    """Versions that can still be fetched; those still to be evaluated stay besides."""

    threads: int | None = Field(None, ge=1)
    """CPU threads that compare, compress and hash, and copy what is broadcast, beside training; without it
    half of the cores, 32 at most."""

    broadcast_timeout_s: float = Field(120.0, gt=0)
    """How long an engine with `update = "group"` may take to join the learner's group, and to take a version,
    before it is left to fetch that by the transport."""

    broadcast_device_bytes: int = Field(0, ge=0)
    """Memory of rank 0's GPU, for each engine on CUDA with `update = "group"`: weights lie there before the
    engine stands still, and need not cross PCIe then. Training has so much less, so grant what its largest
    step leaves free; more than the published weights (and a few MB) is not taken."""

    transport: TransportConfig = BusTransport()
    """The way that the bytes take; what is announced goes over the bus."""
