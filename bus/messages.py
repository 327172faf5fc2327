"""Messages on streams, keys and notices: frozen dataclasses that `codec.py` packs and checks.

Trajectories are in `trajectory.py`, requests and their answers in `requests.py`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Literal

import numpy as np

from bus.codec import Json, Message
from bus.errors import SchemaError
from bus.images import PlacedImage, check_all_given, check_images, shown_tokens
from bus.trajectory import LARGEST_REWARD

Wait = Literal[
    "",
    "batch",
    "device",
    "engine",
    "environments",
    "evaluation",
    "groups",
    "leases",
    "policy",
    "rewards",
    "shards",
    "staleness",
    "teachers",
    "throttle",
    "versions",
    "warmup",
]
"""What a process waits for; empty for one that works."""
LARGEST_PACE = 1000.0
"""Largest factor by which actors speak less often than in a small run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt(Message, tag="prompt"):
    """One task: plain text or chat messages, with the label and metadata that its reward needs."""

    content: str | list[Json]
    """Plain text (one user message), or chat messages [{"role": ..., "content": ...}, ...]."""
    label: str | None = None
    metadata: dict[str, Json] = field(default_factory=dict)
    tools: list[Json] = field(default_factory=list)
    """Functions that the model is offered, in the shape of OpenAI's `tools`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease(Message, tag="lease"):
    """Permission to roll out one prompt `samples` times. It is acked when the group is stored or rejected."""

    lease_id: int
    """Number of the lease in the order of issue, from 0 over the whole run."""
    prompt: Prompt
    samples: int
    policy_version: int
    """The learner's version when the lease was issued: the oldest that can sample it."""
    republished: bool = False
    """Says whether the lease was on the bus before: some of its trajectories may be stored already."""
    run: str = ""
    """Identity of the run that issued it; its trajectories repeat it, since run names may be used again."""

    @property
    def group_id(self) -> str:
        return group_name(self.lease_id)


def group_name(lease_id: int) -> str:
    return f"g{lease_id:08d}"


def trajectory_name(lease_id: int, sample: int) -> str:
    """Return the name of one of a group's trajectories."""
    return f"{group_name(lease_id)}.{sample}"


def parse_trajectory_name(name: str) -> tuple[int, int]:
    """Return lease and sample of a name that `trajectory_name` made; raises `SchemaError` for any other."""
    match = re.fullmatch(r"g([0-9]{8,18})\.([0-9]{1,9})", name)
    if match is None or trajectory_name(lease_id := int(match[1]), sample := int(match[2])) != name:
        raise SchemaError(
            f"{name[:100]!r} names no trajectory: it is written like g00000012.3", kind="reward"
        )
    return lease_id, sample


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRejected(Message, tag="group_rejected"):
    """A group that will not be trained on; its lease is refunded."""

    lease_id: int
    reason: str
    """Short reason to count by, such as zero_variance or rollout_failed."""
    detail: str = ""
    actor: str = ""
    rewards: tuple[float, ...] = ()
    """Rewards of its episodes, one for each agent, as far as they are known and may be trusted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardGiven(Message, tag="reward_given"):
    """Reward of a trajectory that is published without one; it may come before it. The first one counts."""

    trajectory_id: str
    reward: float
    source: str = ""
    """Name of the process or person that gives it."""

    def check(self) -> None:
        parse_trajectory_name(self.trajectory_id)
        if not abs(self.reward) <= LARGEST_REWARD:
            raise SchemaError(f"{self.trajectory_id}: reward is {self.reward}", kind="reward")

    @property
    def lease_id(self) -> int:
        return parse_trajectory_name(self.trajectory_id)[0]

    @property
    def sample(self) -> int:
        return parse_trajectory_name(self.trajectory_id)[1]


# --- weights ---


PART_DIGEST_BYTES = 32
"""Size of the SHA-256 of a part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobRef(Message, tag="blob"):
    """Bytes that lie on a stream as numbered chunks `<subject>.<n>`, or elsewhere as a file of that name."""

    subject: str
    chunks: int
    size_bytes: int
    digest: str
    """SHA-256 of the whole, or, of a blob in parts, of their digests; hexadecimal."""
    origin: str = ""
    """URL of the directory or server that has the file; empty for the run's stream."""
    part_bytes: int = 0
    """Size of its parts but the last; 0 where parts have no digests."""
    part_sha256: bytes = b""
    """Digests of the parts, in order (`storage.weights.blob_parts`)."""

    @property
    def parts(self) -> int:
        """Return the number of parts that have a digest."""
        return len(self.part_sha256) // PART_DIGEST_BYTES

    def check(self) -> None:
        parts = -(-self.size_bytes // self.part_bytes) if self.part_bytes > 0 else 0
        if len(self.part_sha256) not in (0, parts * PART_DIGEST_BYTES):
            raise SchemaError(
                f"{self.subject}: {self.size_bytes} bytes in parts of {self.part_bytes} cannot have "
                f"{self.parts} digests"
            )
        if not 1 <= self.chunks <= max(1, self.size_bytes):
            raise SchemaError(
                f"{self.subject}: {self.size_bytes} bytes in {self.chunks} chunks are impossible"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRef(Message, tag="delta_ref"):
    """Names the delta of the weights from one version to another, and where it lies."""

    base_version: int
    policy_version: int
    blob: BlobRef
    """The delta, of several ranks its beginning, which rank 0 of the learner stores."""
    rest: tuple[BlobRef, ...] = ()
    """What follows in the delta, which other ranks store."""

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        return self.blob, *self.rest


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptVersion(Message, tag="kept_version"):
    """Names the snapshot of a version that stays when later ones come, for opponents pinned to it."""

    policy_version: int
    snapshot: BlobRef
    rest: tuple[BlobRef, ...] = ()
    """Snapshots of the same version with the weights that other ranks have."""

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        return self.snapshot, *self.rest


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe(Message, tag="probe"):
    """Token sequences with the log-probs that the learner gives them at a version: engines must agree."""

    token_ids: tuple[tuple[int, ...], ...]
    """Sequences of two tokens or more."""
    logprobs: tuple[tuple[float, ...], ...]
    """For each sequence the nats of all its tokens but the first and those that stand for an image, at
    temperature 1."""
    images: tuple[tuple[PlacedImage, ...], ...] = ()
    """Images among the tokens of each sequence, with their bytes; empty where no sequence shows any."""

    def check(self) -> None:
        lengths = [len(tokens) for tokens in self.token_ids]
        if len(self.images) not in (0, len(lengths)):
            raise SchemaError(f"a probe of {len(lengths)} sequences has images of {len(self.images)}")
        for length, images in zip(lengths, self.images, strict=False):
            check_images("the probe", images, np.zeros(length, bool))
        check_all_given(self.images)
        if list(map(len, self.logprobs)) != self._scored or min(self._scored, default=0) < 1:
            raise SchemaError(f"a probe of {lengths} tokens has {[len(v) for v in self.logprobs]} log-probs")

    @property
    def _scored(self) -> list[int]:
        sequences = zip_longest(self.token_ids, self.images, fillvalue=())
        return [int((~shown_tokens(len(tokens), images)[1:]).sum()) for tokens, images in sequences]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedBase(Message, tag="adapted_base"):
    """Says which weights published low-rank adapters belong to: W becomes W + scale * B A."""

    weights: BlobRef
    """The frozen weights, safetensors with Hugging Face names; every version of a learner has the same. Of
    several ranks those that rank 0 of the learner stored."""
    scale: float
    rank: int = 0
    """Rows of each A; 0 where a learner before this field does not say."""
    modules: tuple[str, ...] = ()
    """Last two parts of the names of the layers that have an adapter, as `self_attn.q_proj`, each once; of
    experts without their numbers, as `experts.up_proj`."""
    weight_decomposed: bool = False
    """Says whether the rows of the sum have lengths of their own, which are published too."""
    rest: tuple[BlobRef, ...] = ()
    """Frozen weights that other ranks stored."""
    digest: str = ""
    """Digest of all frozen weights, however many ranks stored them; empty from a learner before this
    field."""

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        return self.weights, *self.rest

    @property
    def identity(self) -> str:
        """Return what is equal for equal frozen weights."""
        return self.digest or self.weights.digest


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyManifest(Message, tag="policy"):
    """A published policy version and where its weights lie."""

    policy_version: int
    incarnation: str
    """Learner process that published it; after a resume the same version number is another policy."""
    snapshot: BlobRef
    """The snapshot: all weights of `snapshot_version`, safetensors with Hugging Face names; of several ranks
    those that rank 0 of the learner has."""
    model: BlobRef
    """The model directory without weights: config, tokenizer, chat template."""
    stage: str
    """Stage of the learner: `warmup` needs no rollouts, `rl` needs them, `done` needs no more."""
    trains_from: int = 0
    """Version at which reinforcement learning began: admission counts from it."""
    snapshot_version: int | None = None
    """Version of the snapshot; `None` if it is this version."""
    deltas: tuple[DeltaRef, ...] = ()
    """Deltas from version to version, up to this one. They start at the snapshot's version, or at an older
    one for actors that have that."""
    probe: Probe | None = None
    """What an engine must say of some sequences once it has this version; `None` where none was scored."""
    kept: tuple[KeptVersion, ...] = ()
    """Earlier versions, and perhaps this one, that stay as snapshots."""
    keeping: tuple[int, ...] = ()
    """Earlier versions whose snapshots are to stay and are still being written."""
    ess_fraction: float | None = None
    """Effective sample size of the step that made this version, as a fraction of its tokens; `None` where no
    step of reinforcement learning did, or none was measured."""
    pause_reason: str = ""
    """Why leases are to be issued for the next step alone, in words; empty where they need not be."""
    adapted: AdaptedBase | None = None
    """With this set, snapshots and deltas hold A and B of these weights by peft's names, nothing else."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Versions of packages that an engine must have like the learner, by name; empty where it may have
    others."""
    snapshot_rest: tuple[BlobRef, ...] = ()
    """Snapshots of the same version with the weights that other ranks have."""

    def check(self) -> None:
        for ref, following in pairwise(self.deltas):
            if ref.policy_version != following.base_version:
                raise SchemaError(
                    f"a delta to version {ref.policy_version} is followed by one from "
                    f"{following.base_version}"
                )
        if any(ref.base_version >= ref.policy_version for ref in self.deltas):
            raise SchemaError("a delta does not lead to a later version")
        if self.deltas and self.deltas[-1].policy_version != self.policy_version:
            raise SchemaError(f"the deltas of version {self.policy_version} do not lead there")
        if self.since(self.snapshot_at) is None:
            raise SchemaError(f"no delta leads from version {self.snapshot_at} to {self.policy_version}")

    @property
    def snapshot_at(self) -> int:
        return self.policy_version if self.snapshot_version is None else self.snapshot_version

    @property
    def snapshot_blobs(self) -> tuple[BlobRef, ...]:
        return self.snapshot, *self.snapshot_rest

    def since(self, policy_version: int) -> tuple[DeltaRef, ...] | None:
        """Return the deltas that lead here from `policy_version`; `None` if there are none."""
        if policy_version == self.policy_version:
            return ()
        found = (n for n, ref in enumerate(self.deltas) if ref.base_version == policy_version)
        first = next(found, None)
        return None if first is None else self.deltas[first:]


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotWanted(Message, tag="snapshot_wanted"):
    """An actor cannot get the announced weights and asks the learner for a snapshot."""

    incarnation: str
    """The learner that announced them; empty when nothing was found announced."""
    policy_version: int
    reason: str
    lacks_base: bool = False
    """Whether the weights below published adapters cannot be had, and not the adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles(Message, tag="model_files"):
    """Small files of a model directory, by name."""

    names: tuple[str, ...]
    contents: tuple[bytes, ...]


# --- messages that every screen reads ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics(Message, tag="metrics"):
    """Numbers of one process at one moment, named `area/name_unit`."""

    source: str
    step: int
    """Optimizer step they belong to, or the latest known."""
    time_s: float
    """Seconds since the epoch."""
    values: dict[str, Json]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status(Message, tag="status"):
    """Says what a process is doing now; sent twice a second or less often, and never stored."""

    source: str
    role: str
    doing: str
    """Phrase for a human: what the process works on or waits for."""
    pid: int
    peak_rss_bytes: int
    values: dict[str, Json] = field(default_factory=dict)
    host: str = ""
    started_s: float = 0.0
    """Time at which the process began, in seconds since the epoch by its host's clock."""
    next_s: float = 0.5
    """Seconds until the next one: they are rarer in a run of many actors."""
    revision: str = ""
    """Digest of the run's settings that the process works by."""
    settings_differ: tuple[str, ...] = ()
    """Settings that are others in the run by now, each with both values: it goes on by its own."""
    wait: str = ""
    """What the process waits for, one of `Wait` or a word of a newer build; empty while it works."""
    reason: str = ""
    """Phrase for a human: why it waits."""
    not_storing: tuple[str, ...] = ()
    """Streams whose server does not store what this process publishes."""

    @property
    def waits(self) -> bool:
        """Return whether the process is held up; storage at its staleness bound has done its work."""
        return self.wait not in ("", "staleness")

    @property
    def text(self) -> str:
        """Return all that the process says of itself, for a human."""
        text = f"{self.doing}: {self.reason}" if self.reason else self.doing
        return f"{stores_nothing(self.not_storing)}; {text}" if self.not_storing else text


def stores_nothing(streams: Sequence[str]) -> str:
    """Return that nats-server stores nothing on these streams, with the remedy, for a human. It writes a
    stream no more after a failed write, as on a full disk; `launch bus` restarts it once there is room."""
    remedy = "free its disk if that is full, and restart nats-server where `launch bus` does not"
    return f"the bus stores nothing on {', '.join(streams)}: {remedy}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace(Message, tag="pace"):
    """Says how often actors speak; storage tells it when there are many."""

    slower: float
    """Factor by which their status, counters, pulls and polls are rarer than in a small run; 1 or more."""

    def check(self) -> None:
        if not 1 <= self.slower <= LARGEST_PACE:
            raise SchemaError(f"slower={self.slower}: it is between 1 and {LARGEST_PACE:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter(Message, tag="dead_letter"):
    """A message that was set aside, since it does not decode or must not be acted on."""

    subject: str
    reason: str
    data: bytes
    origin: str = ""
    """Sequence number on its stream."""
    kind: str = "unreadable"
    """Word for what is wrong with the message, to count by."""
    actor: str = ""
    """Actor that made the message, if it says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord(Message, tag="run"):
    """Record of the run, which a process needs to join that knows only the bus and the run's name."""

    name: str
    config_json: str
    """The resolved configuration."""
    announced_by: str = ""
    """Incarnation of the dispatcher that announced it: as long as that one lives, it stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity(Message, tag="run_identity"):
    """Says which of the runs of one name the streams on a bus belong to, and where its ledger lies."""

    identity: str
    host: str
    directory: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleHolder(Message, tag="role_holder"):
    """Process that holds an exclusive role."""

    incarnation: str
    host: str
    pid: int
    pids_of: str = ""
    """Where `pid` names that process: this boot of this kernel, and the PID namespace (one per container)."""
