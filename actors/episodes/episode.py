"""What a rollout leaves behind: the trajectories of its agents, or why it failed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from actors.episodes.agents import DEFAULT_AGENT
from actors.episodes.errors import REWARD_FAULT
from actors.episodes.task import Answer
from bus.codec import Json
from bus.images import PlacedImage
from bus.kept_sets import KeptSets
from bus.policy_names import DEFAULT_POLICY
from bus.trajectory import TRUSTED_ENDS, YOUNGEST, End, Turn


class Fork(NamedTuple):
    """Where a trajectory of an episode was forked from another."""

    strand: int
    """Number of the other one."""
    token: int
    """Number of tokens that both begin with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentTrajectory:
    """One agent's part of an episode as a flat sequence of L tokens."""

    token_ids: np.ndarray
    """int32 [L]"""
    loss_mask: np.ndarray
    """bool [L], True on sampled tokens that may be trained."""
    behaviour_logprobs: np.ndarray
    """float32 [L], nats, under the weights that sampled the token; 0 where none was sampled."""
    policy_versions: np.ndarray
    """int32 [L], the weights behind each token; -1 where none was sampled."""
    turns: tuple[Turn, ...]
    reward: float
    end: End
    strand: int = 0
    """Number of this trajectory among those that were recorded in its episode."""
    agent: str = DEFAULT_AGENT
    policy: str = DEFAULT_POLICY
    fork: Fork | None = None
    """What the trajectory was forked from; None where it began by itself."""
    trainable: bool = True
    """False for a trajectory that is only recorded: a frozen opponent's, a judge's, or greedy turns alone."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    reward_due: bool = False
    """The reward comes later; `reward` says nothing."""
    reward_source: str = ""
    """Who gave the reward, and from where, if it was not computed by the actor."""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    routed_experts: np.ndarray | None = None
    """uint8 [L - 1, layers, experts per token], as `Generation` has it: the last token has no row."""
    kept: KeptSets | None = None
    """Kept sets of the L tokens, where sampling cut tokens off and told which it kept."""
    images: tuple[PlacedImage, ...] = ()
    """Images among the tokens, in order, with their bytes."""
    kv_versions: np.ndarray | None = None
    """int32 [L], the oldest version of the keys and values behind each token, as `Generation` has it; equal
    to `policy_versions` where the token's own weights computed all of them, None where they always did."""

    @property
    def is_trained(self) -> bool:
        """Return whether the trajectory enters baselines and losses: trained, with a trusted reward."""
        return self.trainable and self.end in TRUSTED_ENDS

    @property
    def oldest_version(self) -> int:
        """Return the version of the oldest token of the mask; where the mask is empty, younger than any."""
        return int(self.policy_versions[self.loss_mask].min(initial=YOUNGEST))


@dataclass(frozen=True, slots=True)
class Episode:
    """All that one rollout of a task produced."""

    trajectories: tuple[AgentTrajectory, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to record, by `area/name_unit`: each actor records the mean over its latest episodes."""
    answer: Answer | None = None
    """What was scored, where `score_group` of its environment is to score it again."""
    outcome: float | None = None
    """What a held-out task counts with, where that is not the reward of the first trajectory."""
    environment: str = ""
    """Name of the environment that the prompt chose, in a run that has several."""

    @property
    def end(self) -> End:
        """Return the first end of a trained trajectory that is not to be trusted, or else how the first
        trajectory ended."""
        if len(self.trajectories) == 1:  # the usual case, which is asked for several times
            return self.trajectories[0].end
        ends = [part.end for part in self.trajectories if part.trainable] or [self.trajectories[0].end]
        return next((end for end in ends if end not in TRUSTED_ENDS), ends[0])

    @property
    def fault(self) -> str:
        """Return how the policy kept the episode from being scored; empty where it is scored."""
        noted = (part.metadata.get(REWARD_FAULT, "") for part in self.trajectories)
        return str(next(filter(None, noted), ""))

    def with_frozen(self, policies: Collection[str]) -> "Episode":
        """Return the episode with nothing to train of these policies, which only play any more."""
        if not policies:
            return self
        parts = (
            replace(part, trainable=False, loss_mask=np.zeros_like(part.loss_mask))
            if part.policy in policies
            else part
            for part in self.trajectories
        )
        return replace(self, trajectories=tuple(parts))


@dataclass(frozen=True, slots=True)
class FailedEpisode:
    """A rollout that something around the policy ended, so that no reward says anything about it."""

    end: End
    reason: str

    def as_episode(self, trajectories: int, policy: str = DEFAULT_POLICY) -> Episode:
        """Record the failure in as many trajectories as its siblings have: no tokens, and why they ended. A
        group is complete when each of its episodes has ended, so the failed one takes its place too."""
        nothing = np.empty(0, np.int32)
        failed = AgentTrajectory(
            token_ids=nothing,
            loss_mask=nothing.astype(np.bool_),
            behaviour_logprobs=nothing.astype(np.float32),
            policy_versions=nothing,
            turns=(),
            reward=0.0,
            end=self.end,
            policy=policy,
            metadata={"failure": self.reason},
        )
        return Episode(tuple(replace(failed, strand=n) for n in range(trajectories)))
