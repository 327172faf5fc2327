"""Tells what an agent did in an episode, token by token: actors send it, shards store it, learners train on
it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf, isfinite, prod
from typing import Literal, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from bus.agent_rewards import AgentReward
from bus.codec import BoolArray, Float32Array, Int32Array, Json, Message, encode
from bus.config import LEAST_TEMPERATURE
from bus.errors import SchemaError
from bus.images import ChangeImages, PlacedImage, check_all_given, check_images, given_everywhere, given_once
from bus.kept_sets import KeptSets, check_kept_sets
from bus.older_kv import check_older_kv, kv_versions_from
from bus.policy_names import DEFAULT_POLICY

FinishReason = Literal["stop", "length", "abort"]
End = Literal[
    "completed",
    "length",
    "turn_limit",
    "timeout",
    "environment_error",
    "tool_error",
    "reward_error",
    "engine_error",
    "cancelled",
]
"""Says why a trajectory has no more turns."""
TRUSTED_ENDS: frozenset[End] = frozenset({"completed", "length", "turn_limit"})
"""Ends that the policy itself brought about, so that the reward says something about it. The others are
failures of what surrounds it; trained as zero rewards they would bias the policy."""
SOURCE = "source"
"""Entry of the metadata of prompts and of their trajectories: the name of the data that a prompt is of."""
TASK_KEYS = ("id", "task_id")
"""Entries that name its task, where a prompt has one."""
YOUNGEST = int(np.iinfo(np.int32).max)
"""Larger than any policy version."""
LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Largest absolute value of a reward: the learner computes in float32."""
SMALLEST_LOGPROB = -1e4
"""Least log-prob in nats that an engine may report. A softmax in float32 draws nothing below -104, and even a
token that a grammar forced is no further from the likeliest than logits can be."""
LARGEST_LOGPROB = 1e-2
"""Largest log-prob: above 0 by no more than the rounding of half-precision logits."""


class Turn(NamedTuple):
    """One completion in a trajectory: the tokens [start, stop) that the policy sampled, and how."""

    start: int
    stop: int
    finish_reason: FinishReason
    temperature: float = 1.0
    """Divisor of the logits. 0 is greedy: the likeliest token was taken, and log-probs are those at 1."""
    top_p: float = 1.0
    """Mass of the likeliest tokens that were drawn from; 1 is all. Log-probs are those of all tokens, unless
    the trajectory has the kept set of a token: then they are of that set."""
    top_k: int = 0
    """Says how many of the likeliest tokens were drawn from; 0 is all of them."""
    reward: float | None = None
    """Reward of this turn alone, where the environment gives one."""
    min_p: float = 0.0
    """Least probability of what was drawn from, as a fraction of the likeliest token's; 0 is all."""

    @property
    def is_cut_off(self) -> bool:
        """Tell whether tokens were drawn from some of the vocabulary alone."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def is_greedy(self) -> bool:
        """Tell whether the tokens were chosen, not drawn: their log-probs are not those of the sampling
        policy."""
        return self.temperature < LEAST_TEMPERATURE


class Parent(NamedTuple):
    """Says where a trajectory was forked from another of its episode."""

    trajectory_id: str
    token: int
    """Number of tokens that both begin with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory(Message, tag="trajectory", version=2):
    """One agent's part of an episode as a flat sequence of L tokens, prompt included. An episode that failed
    before a token was sampled has a trajectory of no tokens, whose `end` says why."""

    trajectory_id: str
    """Same bytes for the same lease and sample whoever rolls it out: a redelivery stores nothing new."""
    group_id: str
    lease_id: int
    sample: int
    """Position among its siblings, 0 <= sample < group_size."""
    group_size: int
    """Trajectories the group has when complete."""
    rollout: int
    """Says which rollout of the prompt it belongs to, from 0: trajectories of one episode share it."""
    token_ids: Int32Array
    loss_mask: BoolArray
    """[L], True on sampled tokens that may be trained, which those of greedy turns may not."""
    behaviour_logprobs: Float32Array
    """[L] nats, at the turn's temperature, under the weights that sampled the token; 0 where none did."""
    policy_versions: Int32Array
    """[L], the weights behind each token: a swap in mid-rollout shows here; -1 where none sampled it."""
    turns: tuple[Turn, ...]
    """Completions in order; they do not overlap, and every token of the mask lies in one of them."""
    reward: float
    """Reward of the outcome."""
    end: End
    agent: str = "solver"
    """Whose part it is, by the environment's name for it."""
    policy: str = DEFAULT_POLICY
    """Name of the policy that is trained on it."""
    parent: Parent | None = None
    """Says what the trajectory was forked from; None where it began by itself."""
    trainable: bool = True
    """False for a frozen opponent or a judge: it is recorded, but enters neither baselines nor losses."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Parts of the outcome's reward by name, for the record."""
    actor: str = ""
    metadata: dict[str, Json] = field(default_factory=dict)
    reward_due: bool = False
    """The reward comes later, as a `RewardGiven`; `reward` says nothing. Nobody trains on it before."""
    run: str = ""
    """Identity of the run of its lease."""
    routed_experts: bytes = b""
    """`experts` as bytes, of one byte an id or of two; empty where they were not recorded."""
    moe_layers: int = 0
    experts_per_token: int = 0
    kept_counts: bytes = b""
    """Number of tokens in the kept set of each token, uint16 [L]: what it was drawn from where sampling cut
    others off. 0 where none is recorded; empty where none is for any token."""
    kept_tokens: bytes = b""
    """Token ids of the kept sets, int32, one set after the other."""
    images: tuple[PlacedImage, ...] = ()
    """Images among its tokens, in order; the tokens that stand for them are never trained."""
    older_kv: bytes = b""
    """Runs of tokens that were sampled over keys and values of older weights (`bus/older_kv.py`); empty where
    each token's own weights computed all of them."""
    reward_source: str = ""
    """Who gave the reward, and from where: `program`, `verifier` or `client` with an address, `settings`, or
    the source of a reward that came later. Empty where the actor computed it, or an older build did not
    say."""

    def check(self) -> None:
        """Refuse what would poison training: unequal lengths, non-finite numbers, nothing to train on."""
        ids, logprobs, mask = self.token_ids, self.behaviour_logprobs, self.loss_mask
        lengths = [len(ids), len(mask), len(logprobs), len(self.policy_versions)]
        if lengths.count(lengths[0]) != len(lengths):
            raise SchemaError(f"{self.trajectory_id}: arrays of {lengths} tokens are not of one length")
        masked = np.count_nonzero(mask)
        if not masked and self.is_trained:
            raise SchemaError(f"{self.trajectory_id}: there is no token to train on among {lengths[0]}")
        if not all(map(isfinite, _extremes(logprobs))):
            raise SchemaError(f"{self.trajectory_id}: a behaviour log-prob is not finite")
        versions = self.policy_versions[mask]
        if (len(ids) and ids[ids.argmin()] < 0) or (masked and versions[versions.argmin()] < 0):
            raise SchemaError(f"{self.trajectory_id}: a token id or a sampled token's version is negative")
        if self._masked_in_turns() != masked:
            raise SchemaError(f"{self.trajectory_id}: a token of the mask lies outside its turns")
        self._check_place()
        self._check_rewards()
        check_kept_sets(self.trajectory_id, self.token_ids, self.kept_counts, self.kept_tokens)
        self._check_experts()
        check_images(self.trajectory_id, self.images, mask)
        check_older_kv(self.trajectory_id, self.older_kv, self.policy_versions)

    def _check_experts(self) -> None:
        layers, per_token = self.moe_layers, self.experts_per_token
        ids = max(0, len(self.token_ids) - 1) * layers * per_token
        if min(layers, per_token) < 0 or len(self.routed_experts) not in (ids, 2 * ids):
            raise SchemaError(
                f"{self.trajectory_id}: {len(self.routed_experts)} bytes of routed experts for "
                f"{len(self.token_ids)} tokens, {layers} layers and {per_token} experts a token"
            )

    def _masked_in_turns(self) -> int:
        """Return the number of tokens that the mask has within the turns, each of which is checked."""
        end = masked = 0
        for turn in self.turns:
            if not end <= turn.start <= turn.stop <= len(self.loss_mask):
                raise SchemaError(
                    f"{self.trajectory_id}: the turn of tokens [{turn.start}, {turn.stop}) does not lie "
                    f"between token {end} and the end, {len(self.loss_mask)}"
                )
            cut = 0 < turn.top_p <= 1 and turn.top_k >= 0 and 0 <= turn.min_p <= 1
            if not cut or not 0 <= turn.temperature < inf:
                raise SchemaError(
                    f"{self.trajectory_id}: a turn cannot have been sampled at temperature "
                    f"{turn.temperature}, top_p {turn.top_p}, top_k {turn.top_k} and min_p {turn.min_p}"
                )
            within = int(np.count_nonzero(self.loss_mask[turn.start : turn.stop]))
            if within and turn.is_greedy:
                raise SchemaError(
                    f"{self.trajectory_id}: the mask holds tokens of a greedy turn, whose log-probs are not "
                    "those that they were drawn with"
                )
            end = turn.stop
            masked += within
        return masked

    def _check_place(self) -> None:
        """Refuse a position outside the group, and a parent outside the episode's group or own tokens."""
        if not 0 <= self.sample < self.group_size:
            raise SchemaError(
                f"{self.trajectory_id}: sample {self.sample} of a group of {self.group_size} does not exist"
            )
        if self.rollout < 0:
            raise SchemaError(f"{self.trajectory_id}: rollout {self.rollout} of its prompt does not exist")
        if self.parent is not None and not (
            0 <= self.parent.token <= len(self.token_ids)
            and self.parent.trajectory_id.startswith(f"{self.group_id}.")
            and self.parent.trajectory_id != self.trajectory_id
        ):
            raise SchemaError(f"{self.trajectory_id}: it cannot have been forked from {self.parent}")

    def _check_rewards(self) -> None:
        if not abs(self.reward) <= LARGEST_REWARD:  # also refuses NaN
            raise SchemaError(f"{self.trajectory_id}: the reward is {self.reward}, beyond what float32 holds")
        for turn in self.turns:
            if turn.reward is not None and not abs(turn.reward) <= LARGEST_REWARD:
                raise SchemaError(
                    f"{self.trajectory_id}: the reward of a turn is {turn.reward}, beyond float32"
                )
        for name, value in self.reward_components.items():
            if type(value) not in (int, float) or not abs(value) <= LARGEST_REWARD:
                raise SchemaError(f"{self.trajectory_id}: the reward component {name!r} is {value!r}")

    @property
    def episode_id(self) -> str:
        """Return the name of its episode: the group, and which rollout of the prompt it is."""
        return f"{self.group_id}/{self.rollout}"

    @property
    def is_trained(self) -> bool:
        """Tell whether a trajectory enters baselines and losses: its policy is trained, its reward to be
        trusted."""
        return self.trainable and self.end in TRUSTED_ENDS

    @property
    def agent_reward(self) -> AgentReward:
        """Return the reward, as `episode_rewards` takes it; means nothing unless `is_trained`."""
        return AgentReward(self.policy, self.agent, self.rollout, self.reward)

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the last turn; "abort" where there was none."""
        return self.turns[-1].finish_reason if self.turns else "abort"

    @property
    def experts(self) -> NDArray[np.unsignedinteger] | None:
        """[L - 1, moe_layers, experts_per_token]: where each token went as its keys and values were computed,
        uint8, or uint16 for models that have more than 256 experts in a layer.

        The last token has no row: no pass has read it. None where it was not recorded."""
        if not self.routed_experts:
            return None
        shape = (len(self.token_ids) - 1, self.moe_layers, self.experts_per_token)
        width = "u1" if len(self.routed_experts) == prod(shape) else "<u2"
        return np.frombuffer(self.routed_experts, width).reshape(shape)

    @property
    def kept_sets(self) -> KeptSets | None:
        """Return the kept sets of its L tokens, or None where none is recorded."""
        return KeptSets.from_bytes(self.kept_counts, self.kept_tokens) if self.kept_counts else None

    @property
    def kv_versions(self) -> NDArray[np.int32] | None:
        """int32 [L], the oldest version of the keys and values behind each token; None where each token's own
        weights computed all of them."""
        return kv_versions_from(self.older_kv, self.policy_versions)

    @property
    def oldest_version(self) -> int:
        """Return the version of the oldest token of the mask, which defines the trajectory's staleness. Where
        the mask is empty it is younger than any: nothing of the trajectory can be stale."""
        return int(self.policy_versions[self.loss_mask].min(initial=YOUNGEST))

    @property
    def newest_version(self) -> int:
        """Return the version of the newest token of the mask; -1 where the mask is empty."""
        return int(self.policy_versions[self.loss_mask].max(initial=-1))


def refuse_impossible_logprobs(trajectory: Trajectory) -> None:
    """Raise `SchemaError` for behaviour log-probs that no engine can have drawn a token with. To call before
    a trajectory is stored; what an older build has stored stays readable."""
    _refuse_impossible(trajectory.behaviour_logprobs, trajectory.trajectory_id, trajectory.actor)


Groups = Sequence[Sequence[Trajectory]]
"""Trajectories by group: those of one prompt are together, in the order of their samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTurn(Message, tag="kept_turn"):
    """One completion of a rollout that has not ended: who rolls its lease out next need not sample it again.
    A completion that was cut short has the finish reason `abort`, and is gone on with."""

    lease_id: int
    rollout: int
    number: int
    """Counts the completions of the rollout from 0."""
    context: bytes
    """Digest of what was asked: the tokens before it, who asked, and how it was to be sampled."""
    finish_reason: FinishReason
    token_ids: Int32Array
    """[N], what was sampled."""
    behaviour_logprobs: Float32Array
    """[N] nats, as those of a trajectory."""
    policy_versions: Int32Array
    """[N], the weights behind each token."""
    trained: bool = True
    """Says whether the turn is of the run's own policy and may be trained on; a further policy's is not."""
    actor: str = ""
    run: str = ""
    """Identity of the run of its lease."""
    routed_experts: bytes = b""
    """[R, moe_layers, experts_per_token], as the engine reported them; empty where it did not."""
    moe_layers: int = 0
    experts_per_token: int = 0
    expert_bytes: int = 1
    """Bytes of the number of an expert: 1, or 2 where a layer has more than 256."""
    kept_counts: bytes = b""
    """Kept sets of the N tokens, as those of a trajectory."""
    kept_tokens: bytes = b""
    older_kv: bytes = b""
    """Runs of the N tokens that were sampled over keys and values of older weights, as a trajectory's."""

    def check(self) -> None:
        lengths = [len(self.token_ids), len(self.behaviour_logprobs), len(self.policy_versions)]
        if lengths.count(lengths[0]) != len(lengths):
            raise SchemaError(f"{self.name}: arrays of {lengths} tokens are not of one length")
        if min(self.lease_id, self.rollout, self.number) < 0:
            raise SchemaError(f"{self.name}: there is no such turn")
        if lengths[0] and (self.token_ids.min() < 0 or self.policy_versions.min() < 0):
            raise SchemaError(f"{self.name}: a token id or a version is negative")
        _refuse_impossible(self.behaviour_logprobs, self.name, self.actor)
        check_kept_sets(self.name, self.token_ids, self.kept_counts, self.kept_tokens)
        check_older_kv(self.name, self.older_kv, self.policy_versions)
        row = self.moe_layers * self.experts_per_token * self.expert_bytes
        if (
            min(self.moe_layers, self.experts_per_token) < 0
            or self.expert_bytes not in (1, 2)
            or (len(self.routed_experts) % row if row else self.routed_experts)
        ):
            raise SchemaError(f"{self.name}: {len(self.routed_experts)} routed experts in rows of {row}")

    @property
    def name(self) -> str:
        return f"turn {self.number} of rollout {self.rollout} of lease {self.lease_id}"

    @property
    def kept_sets(self) -> KeptSets | None:
        return KeptSets.from_bytes(self.kept_counts, self.kept_tokens) if self.kept_counts else None

    @property
    def oldest_version(self) -> int:
        """Return the version of its oldest token; it is younger than any where it is not trained on."""
        return int(self.policy_versions.min(initial=YOUNGEST)) if self.trained else YOUNGEST

    @property
    def newest_version(self) -> int:
        """Return the version of its newest token; -1 where it is not trained on."""
        return int(self.policy_versions.max(initial=-1)) if self.trained else -1


LEAST_APART_BYTES = 512 << 10
"""Routed experts that are fewer bytes travel in their message: it is not split for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsApart(Message, tag="experts_apart"):
    """Names routed experts that do not travel in the message: an actor has sent them to the shard itself, or
    a learner fetches them from there."""

    digest: bytes
    """Digest of all of them, one after the other: xxh3-128 as a learner fetches them, SHA-256 as an actor
    sends them, behind which it puts bytes that are no other message's."""
    sizes: tuple[int, ...]
    """Bytes of each trajectory of the message, and then of each turn."""
    moe_layers: int
    experts_per_token: int

    def check(self) -> None:
        """Refuse sizes that cannot be, and what is no digest: shards look for a file of its name."""
        if min(self.sizes, default=0) < 0:
            raise SchemaError(f"routed experts of {min(self.sizes)} bytes cannot be")
        if len(self.digest) not in (16, 32):
            raise SchemaError(f"routed experts have a digest of {len(self.digest)} bytes, not of 16 or 32")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryBatch(Message, tag="trajectories", version=2):
    """Trajectories that travel together: siblings of a group, or the answer to a read."""

    trajectories: tuple[Trajectory, ...]
    turns: tuple[KeptTurn, ...] = ()
    """Turns of rollouts that have not ended, in messages and answers of their own."""
    apart: ExpertsApart | None = None
    """Names the routed experts of all of them, where they are not here."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> "TrajectoryBatch":
        """Return the message of these trajectories, in which the bytes of each image travel once."""
        return cls(trajectories=_with_images(trajectories, given_once))

    @property
    def whole(self) -> tuple[Trajectory, ...]:
        """Return the trajectories, each with the bytes of its images."""
        return _with_images(self.trajectories, given_everywhere)

    def check(self) -> None:
        check_all_given([trajectory.images for trajectory in self.trajectories])
        if self.apart is not None and not 0 < len(self.apart.sizes) == len(self.sampled):
            raise SchemaError(
                f"{len(self.apart.sizes)} sizes of routed experts for {len(self.sampled)} trajectories"
            )

    @property
    def sampled(self) -> tuple[Trajectory | KeptTurn, ...]:
        """Return the batch's trajectories, and then its turns."""
        return (*self.trajectories, *self.turns)

    @property
    def apart_bytes(self) -> int:
        """Return the bytes of the routed experts that are not here."""
        return sum(self.apart.sizes) if self.apart is not None else 0

    def without_experts(self, digest: bytes) -> "TrajectoryBatch":
        """Return the message without its routed experts, which have this digest."""
        layers, per_token = max((one.moe_layers, one.experts_per_token) for one in self.sampled)
        sizes = tuple(len(one.routed_experts) for one in self.sampled)
        apart = ExpertsApart(digest=digest, sizes=sizes, moe_layers=layers, experts_per_token=per_token)
        return replace(
            self,
            trajectories=tuple(
                replace(one, routed_experts=b"", moe_layers=0, experts_per_token=0)
                for one in self.trajectories
            ),
            turns=tuple(replace(one, routed_experts=b"") for one in self.turns),
            apart=apart,
        )

    def with_experts(self, data: bytes | bytearray) -> "TrajectoryBatch":
        """Return the message with the routed experts that `apart` names. Raises `SchemaError` where they are
        not those of its tokens."""
        assert self.apart is not None
        apart, count = self.apart, len(self.trajectories)
        if len(data) != self.apart_bytes:
            raise SchemaError(f"{len(data)} bytes of routed experts are not of the sizes {apart.sizes}")
        ends, view = accumulate(apart.sizes), memoryview(data)
        found = [bytes(view[end - size : end]) for end, size in zip(ends, apart.sizes, strict=True)]
        trajectories = tuple(
            replace(
                one,
                routed_experts=experts,
                moe_layers=apart.moe_layers if experts else 0,
                experts_per_token=apart.experts_per_token if experts else 0,
            )
            for one, experts in zip(self.trajectories, found[:count], strict=True)
        )
        turns = tuple(
            replace(one, routed_experts=experts)
            for one, experts in zip(self.turns, found[count:], strict=True)
        )
        whole = replace(self, trajectories=trajectories, turns=turns, apart=None)
        for one in whole.sampled:
            one.check()
        return whole


def joined_batches(batches: Sequence[bytes], *, each: int) -> bytes:
    """Return the `TrajectoryBatch` of the trajectories of several, encoded as they are: each has `each` of
    them, without images, and nothing else."""
    before, _, after = encode(TrajectoryBatch(trajectories=())).partition(_list_of(0))
    begin, end = len(before) + len(_list_of(each)), -len(after)
    bodies = (batch[begin:end] for batch in batches)
    return b"".join((before, _list_of(each * len(batches)), *bodies, after))


def _list_of(length: int) -> bytes:
    """Return the bytes before the items of a list of MessagePack."""
    return bytes(msgpack.packb([None] * length))[: -length or None]


def _with_images(trajectories: Sequence[Trajectory], changed: ChangeImages) -> tuple[Trajectory, ...]:
    images = [trajectory.images for trajectory in trajectories]
    if not any(images):  # copies of frozen objects are slow
        return tuple(trajectories)
    return tuple(replace(one, images=found) for one, found in zip(trajectories, changed(images), strict=True))


def _refuse_impossible(logprobs: NDArray[np.float32], name: str, actor: str) -> None:
    """Raise `SchemaError` for log-probs, [N] nats, that no engine can have drawn a token with."""
    for logprob in _extremes(logprobs):
        if not SMALLEST_LOGPROB <= logprob <= LARGEST_LOGPROB:
            raise SchemaError(
                f"{name}: a behaviour log-prob is {logprob}, but no engine can have "
                f"drawn a token outside of {SMALLEST_LOGPROB} to 0 nats",
                kind="logprob",
                actor=actor,
            )


def _extremes(values: NDArray[np.float32]) -> list[float]:
    """Return the least and the largest, none of no values; NaN is both."""
    # argmin and argmax take a third of the time of min and max
    return [float(values[values.argmin()]), float(values[values.argmax()])] if len(values) else []
