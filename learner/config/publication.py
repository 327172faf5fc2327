"""Settings of how policy versions reach the actors. Loads without torch."""

from typing import Annotated, Literal

from pydantic import Field

from bus.config import Config
from storage.settings.weights_transport import AutoTransport, TransportConfig


class PublicationConfig(Config):
    """Sets how policy versions reach the actors; docs/weights.md says which transport to choose."""

    snapshot_every: int = Field(10, ge=1, le=1000)
    """Versions from one snapshot to the next; those between are published as deltas. A new actor starts from
    the latest snapshot. 1 publishes every version as a snapshot."""
    snapshot_bytes_per_s: int | None = Field(None, ge=1)
    """Bound on the bandwidth with which all ranks together write a snapshot beside deltas: each has an equal
    part of it. `None` sets none. It holds neither for what the bus sends nor for the copy of a version that
    stays from its file to the transport."""
    keep: int = Field(8, ge=2)
    """Number of latest versions that can be fetched, besides those that still wait for their evaluation."""
    keep_versions: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Versions that can be fetched as long as the run goes on, for opponents that are one of them
    (`actors.opponents`). Each is a snapshot, by the transport and in the run's directory."""
    quantisation: Literal["none", "fp8_block", "fp8_ue8m0", "fp8_tensor", "int4"] = "none"
    """Format in which the linear layers of attention, of MLPs and of experts are published; training uses it
    with `learner.quantisation_aware`. `fp8_block`: e4m3 with a float32 scale for each block of 128 x 128.
    `fp8_ue8m0`: the same with powers of two as scales. `fp8_tensor`: one scale for each tensor. `int4`: a
    scale for each 128 columns of a row. The last two are for the embedded engine only."""
    probe: bool = True
    """Whether a few fixed sequences are scored, so that actors can tell whether their engines have a version;
    that is a forward pass of 128 tokens. Versions behind the first of a stage are passed over where it would
    take more than 2 % of the time, unless there is an alarm or `model.numerics` is not `fast`."""
    threads: int | None = Field(None, ge=1)
    """CPU threads that compare, compress and hash weights and copy what is broadcast, while training goes on.
    `None` takes half of the cores, at most 32."""
    broadcast_timeout_s: float = Field(120.0, gt=0)
    """Sets how long an engine with `update = "group"` may take to join the learner's group, and to take a
    version, before it has to fetch that by the transport."""
    broadcast_together: bool = False
    """Whether engines with `update = "group"` are one group, to which each version is sent once, by one
    process: NCCL passes it on among them. An engine that ends during a broadcast then costs the others that
    broadcast: they get the version by the transport, or a new server where SGLang hangs."""
    broadcast_device_bytes: int = Field(0, ge=0)
    """Memory of rank 0's GPU for each group of engines on CUDA with `update = "group"`. Weights are copied
    there before the engines pause, so that they need not cross PCIe during the pause. Training has so much
    less: grant what its largest step leaves free. More than the published weights (and a few MB) is never
    taken."""
    broadcast_digests: bool = True
    """Whether engines on a secured bus check what they are broadcast, by SHA-256 digests that the learner
    signs. Set it to false where nobody else reaches the network between learner and engines: weights are then
    not hashed, and engines do not wait for hashes."""
    transport: TransportConfig = AutoTransport()
    """Transport of the bytes; announcements go over the bus."""
