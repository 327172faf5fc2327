"""Requests between processes, and their answers: over core NATS, never stored. See also `messages.py`."""

from dataclasses import dataclass, field
from math import inf
from typing import Literal

import numpy as np

from bus.agent_rewards import AgentReward
from bus.codec import Int32Array, Message
from bus.config import MOST_PROFILED_STEPS
from bus.errors import SchemaError
from bus.images import NO_IMAGES, ImageCount
from bus.messages import BlobRef

# --- the answer to many requests; bus/connection/answers.py has another ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(Message, tag="done"):
    """The request was carried out."""


# --- actors ask about leases ---


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest(Message, tag="lease_request"):
    """An actor asks what has become of a lease since it was issued."""

    lease_id: int
    attempt: bool = False
    """Says whether the lease came back and is about to be rolled out; such attempts are counted."""
    excused: bool = False
    """Takes back the count of an attempt, which something else than its own rollouts has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseState(Message, tag="lease_state"):
    """State of a lease: whether it is to be rolled out, and by which weights."""

    state: Literal["open", "settled", "quarantined"]
    """`settled`: the group is complete or was given up. `quarantined`: its rollouts ended too many actors."""
    policy_version: int
    """Oldest version that may sample it; it is lowered when a learner resumed from further back."""
    attempts: int = 0
    """Attempts counted so far: of each before this one, nobody heard how it ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStatusRequest(Message, tag="group_status_request"):
    """Asks a shard which trajectories of a group it has stored."""

    lease_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStatus(Message, tag="group_status", version=2):
    """The trajectories that are stored of a group."""

    group_size: int
    """0 when nothing of the group is stored."""
    samples: tuple[int, ...] = ()
    rewards: tuple[AgentReward, ...] = ()
    """Rewards of those that are trained."""
    rewards_due: bool = False
    """Says whether one of the group's rewards is still to come."""
    turns: int = 0
    """Number of stored turns of rollouts that have not ended; `KeptTurnsRequest` asks for them."""

    def check(self) -> None:
        if len(self.rewards) > len(self.samples):
            raise SchemaError(
                f"there are {len(self.rewards)} rewards for {len(self.samples)} samples: give each one"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTurnsRequest(Message, tag="kept_turns_request"):
    """Asks a shard for the stored turns of a lease; the answer is batches of them."""

    lease_id: int


# --- the learner asks the dispatcher ---


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
    """Weight of its loss in this step, above 0: the importance weight of how groups are drawn."""
    tokens: int = 0
    """Tokens of all its trajectories, to balance groups before they are fetched; 0 if nobody counted."""
    computed_tokens: int = 0
    """Tokens of its trained trajectories, of which what several of them begin with counts once; 0 if nobody
    counted. With it, `tokens` are those of trained trajectories."""
    images: ImageCount = NO_IMAGES
    """What the group's trained trajectories show, if that was counted."""

    def check(self) -> None:
        if not 0 < self.weight < inf:  # also refuses NaN
            raise SchemaError(f"the group of lease {self.lease_id} has weight {self.weight}, not above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLease(Message, tag="batch_lease"):
    """The groups of one step. They count as trained on unless the step is rolled back."""

    step: int
    groups: tuple[GroupRef, ...]
    given_to: str = ""
    """Incarnation of the learner; each rank has a `ReplayReader` of its own."""

    def check(self) -> None:
        if len({group.lease_id for group in self.groups}) < len(self.groups):
            raise SchemaError(f"step {self.step} has a group more than once")


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting(Message, tag="waiting"):
    """The batch is not there yet; a human reads `reason` in the terminal view."""

    reason: str
    alarm: str = ""
    """Why the answer may never be there; empty while nothing is known to be wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGroupsRequest(Message, tag="step_groups_request"):
    """Asks which groups a step was given. Anybody may ask: it changes nothing."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGroups(Message, tag="step_groups"):
    """The groups that a step was given, and how far the learner is."""

    step: int
    groups: tuple[GroupRef, ...]
    """Groups in the order of the batch; none if the step has not been given any."""
    incarnation: str
    """Learner that resumed last; if it is another one, later steps may have been given other groups."""
    trained_through: int
    """Newest step whose version the learner published; -1 if not known yet."""
    trains_from: int
    """Version at which reinforcement learning began."""
    stage: str
    """Stage of the learner; empty if not known yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommitted(Message, tag="step_committed"):
    """A checkpoint that includes every step up to `step` is durable."""

    step: int
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsUnreadable(Message, tag="groups_unreadable"):
    """Groups that a step was given cannot be read: it is to be given others. Answered with `Done`."""

    step: int
    lease_ids: tuple[int, ...]
    incarnation: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerResumed(Message, tag="learner_resumed"):
    """A learner starts from `step`: leases of later steps are rolled back, older incarnations are fenced."""

    step: int
    incarnation: str


# --- the learner asks a shard ---


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRequest(Message, tag="read_request"):
    """Asks a shard for the trajectories of these groups."""

    lease_ids: tuple[int, ...]
    apart: bool = False
    """Whether the asker fetches routed experts by HTTP, where they are many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocateRequest(Message, tag="locate_request"):
    """Asks a shard where the trajectories of these groups lie."""

    lease_ids: tuple[int, ...]
    host: str
    """Host of the asker; readers elsewhere do not need the addresses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Located(Message, tag="located"):
    """Host of a shard and, for a reader on that host, file and row of each trajectory."""

    host: str
    """Identity of the machine since its last boot; empty if it is unknown."""
    directory: str = ""
    device: int = 0
    inode: int = 0
    """Inode of the directory, which with `device` identifies it on the host."""
    segments: tuple[str, ...] = ()
    """Names of the segments in the directory."""
    segment_of: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Index in `segments` of each trajectory's segment; groups in the order asked for, then by sample."""
    rows: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Row of each trajectory in its segment."""

    def check(self) -> None:
        if len(self.segment_of) != len(self.rows):
            raise SchemaError(
                f"there are {len(self.rows)} rows in {len(self.segment_of)} segments: each row needs one"
            )
        if len(self.rows) and not (
            0 <= self.segment_of.min() <= self.segment_of.max() < len(self.segments) and self.rows.min() >= 0
        ):
            raise SchemaError(f"an address lies outside the {len(self.segments)} segments")


# --- the dispatcher and its shards ask each other ---


NOTHING_AFTER = 1 << 40
"""A shard that is asked for its groups from this one on answers with none, and how many there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRequest(Message, tag="stored_request"):
    """Asks a shard which groups it completed, from the `after`-th on."""

    after: int
    spreads: bool = False
    """Says whether the answer has the spread of each group's rewards."""
    rewards: bool = False
    """Says whether the answer has each group's rewards."""
    computed_tokens: bool = False
    """Says whether the answer counts what is computed of each group where common beginnings are shared."""
    images: bool = False
    """Says whether the answer counts the images of each group."""
    rolling_out: tuple[int, ...] = ()
    """Leases of the shard that are rolling out, in the first questions of a dispatcher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroups(Message, tag="stored_groups"):
    """Leases whose groups are complete in a shard, in the order of completion."""

    shard: int
    after: int
    lease_ids: tuple[int, ...]
    total: int
    """Groups complete in the shard altogether."""
    spreads: tuple[float, ...] = ()
    """Mean over each group's episodes and agents of |reward - that agent's mean|, if asked for."""
    tokens: tuple[int, ...] = ()
    """Tokens of each group, all its trajectories together; with `computed_tokens` those that are trained."""
    computed_tokens: tuple[int, ...] = ()
    """Tokens of each group's trained trajectories; what several begin with counts once. If asked for."""
    images: tuple[ImageCount, ...] = ()
    """What the trained trajectories of each group show, if asked for."""
    rewards: tuple[tuple[float, ...], ...] = ()
    """Rewards of each group, one for each agent in each episode that is trained on, if asked for."""
    directory: str = ""
    """Where the shard is kept, for a human; empty as long as it has let nothing go."""
    settled_through: int = 0
    """Leases that had been issued when the shard last let settled groups go."""
    forgotten: int = 0
    """Groups that it has let go; the dispatcher had seen them."""
    settled: tuple[int, ...] = ()
    """Leases of the request's `rolling_out` that are settled."""

    def check(self) -> None:
        for name in ("rewards", "spreads", "tokens", "computed_tokens", "images"):
            found = len(getattr(self, name))
            if found not in (0, len(self.lease_ids)):
                raise SchemaError(f"there are {name} of {found} groups for {len(self.lease_ids)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedRequest(Message, tag="issued_request"):
    """A shard asks the dispatcher what the ledger knows."""

    shard: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued(Message, tag="issued"):
    """State of the ledger, which is durable before it is answered."""

    next_id: int
    """First lease that is not issued yet."""
    seen: int
    """Complete groups that the ledger knows in the shard that asked."""
    run: str = ""
    """Identity of the run among those of its name; empty if not known yet."""
    vocabulary: int | None = None
    """Number of token ids of the run's model."""
    newest_version: int | None = None
    """The newest policy version that was ever published."""
    rolling_out: tuple[int, ...] = ()
    """Every lease that is rolling out for the shard that asked."""
    versions: tuple[int, ...] = ()
    """Oldest version that may sample each of them."""

    def check(self) -> None:
        if len(self.rolling_out) != len(self.versions):
            raise SchemaError(
                f"there are {len(self.versions)} versions of {len(self.rolling_out)} leases: each needs one"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FullGroupsRequest(Message, tag="full_groups_request"):
    """Asks a shard of which of these groups it has every trajectory; rewards may still be due."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FullGroups(Message, tag="full_groups"):
    """Groups of which every trajectory is stored: rolling them out again would be useless."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnsettledRequest(Message, tag="unsettled_request"):
    """A shard asks the dispatcher which groups must not be removed."""

    shard: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsettled(Message, tag="unsettled"):
    """Every lease that is neither rejected nor in a committed step: its trajectories are still needed."""

    lease_ids: tuple[int, ...]
    next_id: int = 0
    """Leases from here on are not issued yet; those below that are not named are settled for good."""
    seen: int = 0
    """Complete groups of the shard that the ledger knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseRequest(Message, tag="close_request"):
    """Asks a shard to call these groups complete, though some of their trajectories are missing."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed(Message, tag="closed"):
    """Groups that are complete now, in full or closed short; too little is stored of the others."""

    lease_ids: tuple[int, ...]


# --- others ask the dispatcher ---


@dataclass(frozen=True, kw_only=True, slots=True)
class NewData(Message, tag="new_data"):
    """Asks the dispatcher to issue leases for other prompts from the next one on."""

    prompts: BlobRef
    """A `PromptSet`."""
    keep_old: bool
    """Says whether the data follow the present prompts instead of replacing them."""
    source: str
    """Says where the prompts come from, for a human."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataAccepted(Message, tag="data_accepted"):
    """The data set is in force and durable."""

    first_lease: int
    """First lease that takes its prompt from it."""
    prompts: int
    """Number of prompts now."""


# --- requests about the learner ---


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRequest(Message, tag="profile_request"):
    """Asks the learner to trace its next steps."""

    steps: int

    def check(self) -> None:
        if not 1 <= self.steps <= MOST_PROFILED_STEPS:
            raise SchemaError(f"{self.steps} steps are to be traced: 1 to {MOST_PROFILED_STEPS} can be")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled(Message, tag="profiled"):
    """A profile is written."""

    directory: str
    """Where the profile's files lie, on the learner's host."""
    lines: tuple[str, ...]
    """Says what took most of the time, for a human."""


# --- requests about an actor's engines ---


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChange(Message, tag="engine_change"):
    """Asks an actor to take in an engine that runs already, or to let one of its engines go."""

    action: Literal["join", "leave"]
    engine: str
    """URL of the server that joins, or name of the engine that leaves: the URL, if it joined by one."""
