"""Every message on the bus, as frozen dataclasses. `codec.py` packs and checks them."""

import re
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

import numpy as np

from bus.codec import BoolArray, Float32Array, Int32Array, Json, Message
from bus.errors import SchemaError

FinishReason = Literal["stop", "length", "abort"]
LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Either way: the learner computes in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt(Message, tag="prompt"):
    """One task to solve: plain text or chat messages, with what its reward needs."""

    content: str | list[Json]
    """Plain text (one user message), or chat messages [{"role": ..., "content": ...}, ...]."""
    label: str | None = None
    metadata: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease(Message, tag="lease"):
    """Leave to roll out one prompt `samples` times. Acked when the group is stored or rejected."""

    lease_id: int
    """Counts from 0 over the whole run; the order of issue."""
    prompt: Prompt
    samples: int
    policy_version: int
    """The learner's version when the lease was issued: the oldest that can sample it."""
    republished: bool = False
    """Whether it was on the bus before: some of its siblings may be stored already."""
    run: str = ""
    """Identity of the run that issued it, for its trajectories: another run may have had the same name."""

    @property
    def group_id(self) -> str:
        """Name of the group this lease becomes."""
        return group_name(self.lease_id)


def group_name(lease_id: int) -> str:
    """Name of the group that a lease becomes."""
    return f"g{lease_id:08d}"


def trajectory_name(lease_id: int, sample: int) -> str:
    """Name of one of a group's trajectories."""
    return f"{group_name(lease_id)}.{sample}"


def parse_trajectory_name(name: str) -> tuple[int, int]:
    """Lease and sample of a name that `trajectory_name` made; raises `SchemaError` for any other."""
    match = re.fullmatch(r"g([0-9]{8,18})\.([0-9]{1,9})", name)
    if match is None or trajectory_name(lease_id := int(match[1]), sample := int(match[2])) != name:
        raise SchemaError(
            f"{name[:100]!r} names no trajectory: it is written like g00000012.3", kind="reward"
        )
    return lease_id, sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory(Message, tag="trajectory"):
    """One agent's part of an episode as a flat sequence of L tokens, prompt included."""

    trajectory_id: str
    """Same bytes for the same lease and sample whoever rolls it out: a redelivery stores nothing new."""
    group_id: str
    lease_id: int
    sample: int
    """Position among its siblings, 0 <= sample < group_size."""
    group_size: int
    """Trajectories the group has when complete."""
    token_ids: Int32Array
    loss_mask: BoolArray
    """[L], True on sampled tokens."""
    behaviour_logprobs: Float32Array
    """[L] nats, at the sampling temperature, under the weights that sampled the token; 0 outside the mask."""
    policy_versions: Int32Array
    """[L], the weights behind each token: a swap in mid-rollout shows here; -1 outside the mask."""
    reward: float
    agent: str = "solver"
    finish_reason: FinishReason = "stop"
    actor: str = ""
    metadata: dict[str, Json] = field(default_factory=dict)
    reward_due: bool = False
    """Its reward comes later, as a `RewardGiven`; `reward` says nothing. Nobody trains on it before."""
    run: str = ""
    """Of its lease."""

    def check(self) -> None:
        """Refuse what would poison training: unequal lengths, non-finite numbers, nothing to train on."""
        ids, logprobs, mask = self.token_ids, self.behaviour_logprobs, self.loss_mask
        lengths = [len(ids), len(mask), len(logprobs), len(self.policy_versions)]
        if lengths.count(lengths[0]) != len(lengths):
            raise SchemaError(f"{self.trajectory_id}: arrays of {lengths} tokens")
        if not np.count_nonzero(mask):
            raise SchemaError(f"{self.trajectory_id}: no sampled token among {lengths[0]}")
        # argmin and argmax take a third of the time of min and max; to both, NaN is the extreme
        if not (isfinite(logprobs[logprobs.argmin()]) and isfinite(logprobs[logprobs.argmax()])):
            raise SchemaError(f"{self.trajectory_id}: a behaviour log-prob is not finite")
        if not abs(self.reward) <= LARGEST_REWARD:  # also refuses NaN
            raise SchemaError(f"{self.trajectory_id}: reward is {self.reward}")
        versions = self.policy_versions[mask]
        if ids[ids.argmin()] < 0 or versions[versions.argmin()] < 0:
            raise SchemaError(f"{self.trajectory_id}: a token id or a sampled token's version is negative")
        if not 0 <= self.sample < self.group_size:
            raise SchemaError(f"{self.trajectory_id}: sample {self.sample} of a group of {self.group_size}")

    @property
    def oldest_version(self) -> int:
        """Version of the oldest trained token, which defines the trajectory's staleness."""
        return int(self.policy_versions[self.loss_mask].min())


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryBatch(Message, tag="trajectories"):
    """Trajectories that travel together: siblings of a group, or the answer to a read."""

    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRejected(Message, tag="group_rejected"):
    """A group that will not be trained on; its lease is refunded."""

    lease_id: int
    reason: str
    """Short and countable, such as zero_variance or rollout_failed."""
    detail: str = ""
    actor: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest(Message, tag="lease_request"):
    """An actor asks what has become of a lease since it was issued."""

    lease_id: int
    attempt: bool = False
    """It came back more than once and is about to be rolled out: such attempts are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseState(Message, tag="lease_state"):
    """Whether a lease is still to be rolled out, and by which weights."""

    state: Literal["open", "settled", "quarantined"]
    """`settled`: its group is complete or was given up. `quarantined`: its rollouts ended too many actors."""
    policy_version: int
    """The oldest that may sample it: lower than at its issue where a learner resumed from further back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SiblingsRequest(Message, tag="siblings_request"):
    """Asks a shard what it has of a group."""

    lease_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Siblings(Message, tag="siblings"):
    """The trajectories that are stored of a group."""

    group_size: int
    """0 when nothing of it is stored."""
    samples: tuple[int, ...] = ()
    rewards: tuple[float, ...] = ()
    rewards_due: bool = False
    """Whether one of these rewards is still to come."""

    def check(self) -> None:
        """Refuse rewards that do not fit the samples."""
        if len(self.samples) != len(self.rewards):
            raise SchemaError(f"{len(self.rewards)} rewards for {len(self.samples)} samples")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardGiven(Message, tag="reward_given"):
    """The reward of a trajectory that was published without one, before or after it. The first one counts."""

    trajectory_id: str
    reward: float
    source: str = ""
    """Who gives it."""

    def check(self) -> None:
        """Refuse what names no trajectory and what is no finite number."""
        parse_trajectory_name(self.trajectory_id)
        if not abs(self.reward) <= LARGEST_REWARD:
            raise SchemaError(f"{self.trajectory_id}: reward is {self.reward}", kind="reward")

    @property
    def lease_id(self) -> int:
        """Of the trajectory."""
        return parse_trajectory_name(self.trajectory_id)[0]

    @property
    def sample(self) -> int:
        """Of the trajectory."""
        return parse_trajectory_name(self.trajectory_id)[1]


# --- weights ---


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobRef(Message, tag="blob"):
    """Bytes that lie on a stream as numbered chunks `<subject>.<n>`."""

    subject: str
    chunks: int
    size_bytes: int
    digest: str
    """xxh3-128 of the whole, hexadecimal."""

    def check(self) -> None:
        """Refuse a reference that would have a reader ask for chunks without end."""
        if not 1 <= self.chunks <= max(1, self.size_bytes):
            raise SchemaError(f"{self.subject}: {self.size_bytes} bytes in {self.chunks} chunks")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyManifest(Message, tag="policy"):
    """A published policy version and where its weights lie."""

    policy_version: int
    incarnation: str
    """The learner process that published it: after a resume the same version number is another policy."""
    snapshot: BlobRef
    """safetensors with Hugging Face names."""
    model: BlobRef
    """The model directory without weights: config, tokenizer, chat template."""
    stage: str
    """What the learner is doing with it: `warmup` needs no rollouts, `rl` does, `done` needs no more."""
    trains_from: int = 0
    """Version at which reinforcement learning began: admission counts from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles(Message, tag="model_files"):
    """Small files of a model directory, by name."""

    names: tuple[str, ...]
    contents: tuple[bytes, ...]


# --- learner and storage ---


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest(Message, tag="batch_request"):
    """The learner asks for the groups of one optimizer step. Asking again gives the same groups."""

    step: int
    policy_version: int
    """The version the batch will be trained at."""
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRef(Message, tag="group_ref"):
    """A stored, complete group and the shard that holds it."""

    lease_id: int
    shard: int
    weight: float = 1.0
    """Importance weight of its advantages in this step, at most 1."""
    tokens: int = 0
    """Of all its trajectories together, to balance groups before they are fetched; 0 if nobody counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLease(Message, tag="batch_lease"):
    """The groups of one step: they are counted as trained on unless this step is rolled back."""

    step: int
    groups: tuple[GroupRef, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting(Message, tag="waiting"):
    """Not yet, and why: a human reads `reason` in the terminal view."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenRequest(Message, tag="given_request"):
    """Asks which groups a step was given. Anybody may ask: it changes nothing."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Given(Message, tag="given"):
    """The groups of a step, and where the learner stands."""

    step: int
    groups: tuple[GroupRef, ...]
    """In the order of the batch; none when the step has not been given any."""
    incarnation: str
    """The learner that resumed last: when it is another, later steps may have been given other groups."""
    trained_through: int
    """The newest step whose version the learner published; -1 as long as nobody knows."""
    trains_from: int
    """Version at which reinforcement learning began."""
    stage: str
    """The learner's; empty as long as nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommitted(Message, tag="step_committed"):
    """A checkpoint that includes every step up to `step` is durable."""

    step: int
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerResumed(Message, tag="learner_resumed"):
    """A learner starts from `step`: leases of later steps are rolled back, older incarnations are fenced."""

    step: int
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused(Message, tag="refused"):
    """The request cannot be served, now or later."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(Message, tag="done"):
    """The request was carried out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRequest(Message, tag="read_request"):
    """Asks a shard for the trajectories of these groups."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocateRequest(Message, tag="locate_request"):
    """Asks a shard where the trajectories of these groups lie."""

    lease_ids: tuple[int, ...]
    host: str
    """The asker's: no other needs the addresses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Located(Message, tag="located"):
    """On which host a shard is, and, for a reader there, where each trajectory lies in which file."""

    host: str
    """The machine since its last start; empty where that cannot be told."""
    directory: str = ""
    device: int = 0
    inode: int = 0
    """With `device` what the directory is to the operating system."""
    pieces: tuple[str, ...] = ()
    """Names of the segments in the directory."""
    piece_of: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Of each trajectory, the index of its segment in `pieces`; groups as asked for, by sample."""
    rows: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Of each trajectory, its row in that segment."""

    def check(self) -> None:
        """Refuse addresses that lead nowhere."""
        if len(self.piece_of) != len(self.rows):
            raise SchemaError(f"{len(self.rows)} rows in {len(self.piece_of)} pieces")
        if len(self.rows) and not (
            0 <= self.piece_of.min() <= self.piece_of.max() < len(self.pieces) and self.rows.min() >= 0
        ):
            raise SchemaError(f"an address outside the {len(self.pieces)} pieces")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRequest(Message, tag="stored_request"):
    """Asks a shard which groups it completed, from the `after`-th on."""

    after: int
    spreads: bool = False
    """Whether the answer is to tell how far apart the rewards of each group are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroups(Message, tag="stored_groups"):
    """Leases whose groups are complete in a shard, in the order of completion."""

    shard: int
    after: int
    lease_ids: tuple[int, ...]
    total: int
    """Groups complete in the shard altogether."""
    spreads: tuple[float, ...] = ()
    """Mean |reward - mean reward| of each group's siblings, if asked for."""
    tokens: tuple[int, ...] = ()
    """Of each group, all its trajectories together."""

    def check(self) -> None:
        """Refuse spreads or tokens that do not fit the groups."""
        if self.spreads and len(self.spreads) != len(self.lease_ids):
            raise SchemaError(f"{len(self.spreads)} spreads for {len(self.lease_ids)} groups")
        if self.tokens and len(self.tokens) != len(self.lease_ids):
            raise SchemaError(f"tokens of {len(self.tokens)} groups for {len(self.lease_ids)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedRequest(Message, tag="issued_request"):
    """A shard asks the dispatcher what the ledger knows."""

    shard: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued(Message, tag="issued"):
    """How far the ledger is: durable before it is told."""

    next_id: int
    """Leases below it were issued, none from it on."""
    seen: int
    """Complete groups that the ledger knows in the shard that asked."""
    run: str = ""
    """Which run of this name it is; empty if not known yet."""
    vocabulary: int | None = None
    """Token ids of the run's model."""
    newest_version: int | None = None
    """The newest policy version that was ever published."""
    rolling_out: tuple[int, ...] = ()
    """Every lease that is rolling out for the shard that asked."""
    versions: tuple[int, ...] = ()
    """Of each of them, the oldest that may sample it."""

    def check(self) -> None:
        """Refuse versions that do not fit the leases."""
        if len(self.rolling_out) != len(self.versions):
            raise SchemaError(f"{len(self.versions)} versions of {len(self.rolling_out)} leases")


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRequest(Message, tag="whole_request"):
    """Asks a shard which of these groups it has whole, though their rewards may still be due."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeGroups(Message, tag="whole_groups"):
    """Those of which every trajectory is stored: rolling them out again would be in vain."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnsettledRequest(Message, tag="unsettled_request"):
    """A shard asks the dispatcher which groups must not be removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsettled(Message, tag="unsettled"):
    """Every lease that is neither rejected nor in a committed step: its trajectories are still needed."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseRequest(Message, tag="close_request"):
    """Asks a shard to call these groups complete, though siblings are missing."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed(Message, tag="closed"):
    """Those that are complete now, closed or whole; of the others too little is stored."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewData(Message, tag="new_data"):
    """Asks the dispatcher to issue leases for other prompts from the next one on."""

    prompts: BlobRef
    """A `PromptSet`."""
    keep_old: bool
    """Whether they come after those there are, instead of in their place."""
    source: str
    """Where they come from, for a human."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataAccepted(Message, tag="data_accepted"):
    """The data set is in force, durably."""

    first_lease: int
    """The first that is for it."""
    prompts: int
    """How many there are now."""


# --- what every screen reads ---


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationTask(Message, tag="evaluation_task"):
    """Asks for held-out accuracy of exactly one policy version."""

    policy: PolicyManifest
    prompts: BlobRef
    """A `PromptSet`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet(Message, tag="prompt_set"):
    """Prompts that travel together: the held-out set."""

    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult(Message, tag="evaluation_result"):
    """Mean reward of one policy version on the held-out prompts."""

    policy_version: int
    incarnation: str
    sampled: float
    """One sample a prompt at the sampling temperature."""
    greedy: float
    prompts: int
    seconds: float


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
    """What a process is doing now, about once a second; never stored."""

    source: str
    role: str
    doing: str
    """One phrase for a human: what it works on or waits for."""
    pid: int
    peak_rss_bytes: int
    values: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter(Message, tag="dead_letter"):
    """A message that could not be understood, or must not be acted on, set aside."""

    subject: str
    reason: str
    data: bytes
    origin: str = ""
    """Its number on its stream."""
    kind: str = "unreadable"
    """Countable: what is wrong with it in a word."""
    actor: str = ""
    """Who made it, where it says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord(Message, tag="run"):
    """What a process that knows only the bus and the run's name needs to join."""

    name: str
    config_json: str
    """The resolved configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleHolder(Message, tag="role_holder"):
    """The process that holds a role nobody else may hold."""

    incarnation: str
    host: str
    pid: int
