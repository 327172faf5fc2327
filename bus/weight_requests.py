"""Requests that lead to servers of blobs, and those to the learner for a broadcast to engines."""

from dataclasses import dataclass, field
from typing import Literal

from bus.codec import Message
from bus.errors import SchemaError

MOST_PARTS = 512
"""Parts of a blob: the digests of all travel in each announcement, 32 bytes each."""
MOST_TEXT = 16 << 10
"""Characters of a host's name and of what leads to its server, which the learner keeps for a while."""
GROUP_BEAT_S = 1.0
"""Seconds between two signs of life of an actor whose engine joins a group or receives in it."""

# --- actors ask the learner's server of weights ---


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobAccess(Message, tag="blob_access"):
    """What a client needs to be let in by a server of blobs, and to know that server."""

    token: str = field(repr=False)
    """Bearer token of every request."""
    certificate: str
    """Certificate of the server, as PEM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobAccessAsked(Message, tag="blob_access_asked"):
    """A reader asks a server of weights, over a secured bus, what it needs to be let in."""


# --- actors ask a shard where it takes routed experts ---


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsPlaceAsked(Message, tag="experts_place_asked"):
    """An actor asks a shard where it takes routed experts, which need not pass the bus, or a learner where it
    has those that are stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsPlace(Message, tag="experts_place"):
    """Says where a shard takes routed experts, or has them."""

    url: str
    """Beginning of the URLs of its server, to which the name of what is sent or fetched is added."""
    access: BlobAccess | None = None
    """What the server asks for, on a secured bus."""


# --- hosts ask the learner from whom they get parts of weights ---


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFailed(Message, tag="part_failed"):
    """A host could not get a part where it was told to."""

    part: int
    url: str
    """Server that did not give it; empty for the learner's."""
    is_damaged: bool
    """Whether there were bytes, and others than the digest says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsAsked(Message, tag="parts_asked"):
    """A host says which parts of a blob it has, and asks where the others are."""

    blob: str
    """Subject of the blob."""
    host: str
    """Name of the process, unique in the run."""
    url: str
    """URL at which it serves the parts it has; empty where it serves none."""
    access: BlobAccess | None = None
    """What the host's server asks for, on a secured bus."""
    have: bytes
    """A byte for each part: 0 for one it lacks, 1 for one it has, 2 for one that it is fetching."""
    failed: tuple[PartFailed, ...] = ()
    """What failed since the host asked last."""

    def check(self) -> None:
        lead = (self.access.token, self.access.certificate) if self.access is not None else ()
        text = sum(map(len, (self.blob, self.host, self.url, *lead)))
        if len(self.have) > MOST_PARTS or len(self.failed) > MOST_PARTS or text > MOST_TEXT:
            raise SchemaError(
                f"a host says at most {MOST_PARTS} parts, as many failures and {MOST_TEXT} characters, not "
                f"{len(self.have)}, {len(self.failed)} and {text}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSource(Message, tag="part_source"):
    """Says where to fetch a part."""

    part: int
    url: str
    """URL of another host's server; empty for the learner's."""
    access: BlobAccess | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsFound(Message, tag="parts_found"):
    """The learner says where to fetch parts now; the others are being fetched by somebody."""

    sources: tuple[PartSource, ...]
    machine: str = ""
    """The learner's machine (`storage.disk.host_identity`)."""
    directory: str = ""
    """Directory of the learner's blobs there, which processes of this machine read themselves."""

    def check(self) -> None:
        if "\0" in self.directory:
            raise SchemaError(f"{self.directory!r} is no name of a directory")


# --- engines in the learner's cluster ask it for a broadcast ---


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastWanted(Message, tag="broadcast_wanted"):
    """An engine asks the learner to send it a version, or a later one. Nothing is sent yet."""

    incarnation: str
    """Incarnation of the learner that announced the version."""
    policy_version: int
    group: str
    """Group that the engine has joined already; empty for none."""
    ranks: int
    """Number of the engine's ranks."""
    device: Literal["cpu", "cuda"]
    """Device on which the engine's weights lie."""
    nonce: str
    """A random text, which the offer repeats: one that was made for another request is not taken."""
    first_rank: int = 1
    """First of the engine's ranks in `group`."""
    actor: str = ""
    """Actor process that the engine belongs to, for the log."""

    def check(self) -> None:
        if self.ranks < 1:
            raise SchemaError(f"ranks is {self.ranks}, but an engine has at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedBucket(Message, tag="offered_bucket"):
    """Tensors that the learner sends one after the other, for which an engine needs room, and their group."""

    group: str
    """Group of the broadcast. The engine joins it first if it is in another one."""
    host: str
    port: int
    """Port at which the ranks of the group meet, on `host`."""
    backend: Literal["gloo", "nccl"]
    first_rank: int
    """First of the engine's ranks in the group; the learner is rank 0."""
    world_size: int
    """Number of all ranks of the group."""
    policy_version: int
    names: tuple[str, ...]
    """Hugging Face names of the tensors."""
    dtypes: tuple[str, ...]
    """torch's names of the dtypes."""
    shapes: tuple[tuple[int, ...], ...]
    digests: tuple[bytes, ...]
    """SHA-256 of each tensor; empty on a bus without credentials, where nobody signs them."""

    def check(self) -> None:
        digests = len(self.digests) or len(self.names)
        if not len(self.names) == len(self.dtypes) == len(self.shapes) == digests:
            raise SchemaError(
                f"each tensor needs all of these: there are {len(self.names)} names, {len(self.dtypes)} "
                f"dtypes, {len(self.shapes)} shapes and {len(self.digests)} digests"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOffer(Message, tag="weight_offer"):
    """All that the learner will broadcast to an engine."""

    nonce: str
    """That of the request."""
    buckets: tuple[OfferedBucket, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedOffer(Message, tag="signed_offer"):
    """An offer as it travels."""

    record: bytes
    """A `WeightOffer`, which the learner has signed on a secured bus."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastBegin(Message, tag="broadcast_begin"):
    """The engine is paused and waits: the learner sends what it offered once all engines of the group do."""

    group: str
    first_rank: int
    """First of the engine's ranks in the group."""
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastEnd(Message, tag="broadcast_end"):
    """The engine has queued the reception of all tensors: the learner answers when all of them are sent."""

    group: str
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupBeat(Message, tag="group_beat"):
    """An engine's actor lives, while the engine joins a group or takes what is broadcast there."""

    group: str
    first_rank: int
    """First of the engine's ranks in the group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLeft(Message, tag="group_left"):
    """An engine has left a group for good."""

    group: str
