"""What a rollout starts from and what it leaves behind."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np

from actors.rewards.call_times import CallTimes
from bus.codec import Json
from bus.errors import SchemaError, SluiceError
from bus.images import PlacedImage
from bus.kept_sets import KeptSets
from bus.messages import Prompt
from bus.policy_names import DEFAULT_POLICY
from bus.trajectory import TRUSTED_ENDS, YOUNGEST, End, Turn

if TYPE_CHECKING:
    from actors.policy.policy import Policy
    from actors.rewards.base import Answer

DEFAULT_AGENT = "solver"
ANSWERS = frozenset({"answers", "correct_letter", "reasoning_gym", "tests"})
"""Fields of a prompt's metadata that tell its answer to rewards (`f1`, `gpqa`, `reasoning_gym`, `code`)."""
JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None
ChatMessage: TypeAlias = Mapping[str, JSON]
"""One message of a chat as templates take it: at least `role` and `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt to roll out."""

    task_id: str
    prompt: str | Sequence[JSON]
    """Text (one user message), or chat messages."""
    label: str | None = None
    """What the reward compares with."""
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    sample: int = 0
    """Which rollout of the prompt it is, from 0."""
    heldout: bool = False
    """Whether it only measures: nothing is trained on it."""
    tools: Sequence[ChatMessage] = ()
    """Functions that the prompt offers to the policy, in the shape of OpenAI's `tools`."""

    @classmethod
    def of(cls, prompt: Prompt, task_id: str, *, sample: int = 0, heldout: bool = False) -> Self:
        """Return the task of a prompt as it was on the bus."""
        return cls(
            task_id=task_id,
            prompt=prompt.content,
            label=prompt.label,
            metadata=prompt.metadata,
            sample=sample,
            heldout=heldout,
            tools=tuple(tool for tool in prompt.tools if isinstance(tool, dict)),
        )

    @property
    def public_metadata(self) -> Mapping[str, JSON]:
        """Return the metadata without what tells the answer to rewards, for programs of the policy."""
        return {name: value for name, value in self.metadata.items() if name not in ANSWERS}

    @property
    def messages(self) -> Sequence[ChatMessage]:
        """Return the prompt as a chat; raises SchemaError if it is none."""
        if isinstance(self.prompt, str):
            return ({"role": "user", "content": self.prompt},)
        messages = [message for message in self.prompt if isinstance(message, Mapping) and "role" in message]
        if not messages or len(messages) < len(self.prompt):
            raise SchemaError(
                f"task {self.task_id}: a prompt is text or messages with a role, not {self.prompt!r}"
            )
        return messages


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
    """Its completions, in order."""
    reward: float
    """Reward of the outcome."""
    end: End
    strand: int = 0
    """Number of this trajectory among those that were recorded in its episode."""
    agent: str = DEFAULT_AGENT
    policy: str = DEFAULT_POLICY
    """Name of the policy that is trained on it."""
    fork: Fork | None = None
    """What it was forked from; None where it began by itself."""
    trainable: bool = True
    """False where it is only recorded: a frozen opponent, a judge, or nothing but greedy turns."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward by name."""
    reward_due: bool = False
    """Its reward comes later; `reward` says nothing."""
    reward_source: str = ""
    """Who gave the reward, and from where, if it was not computed by the actor."""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    """What else is worth keeping with it."""
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
        """Return whether it enters baselines and losses: a trained policy's, with a reward to be trusted."""
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
    answer: "Answer | None" = None
    """What was scored, where `score_group` of its environment is to score it again."""
    outcome: float | None = None
    """What a held-out task counts with, where that is not the reward of the first trajectory."""
    environment: str = ""
    """Name of the environment that the prompt chose, in a run that has several."""

    @property
    def end(self) -> End:
        """Return the first end of a trained trajectory that is not to be trusted, or else how the first
        trajectory ended."""
        ends = [part.end for part in self.trajectories if part.trainable] or [self.trajectories[0].end]
        return next((end for end in ends if end not in TRUSTED_ENDS), ends[0])

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
    """What went wrong, for people."""

    def as_episode(self, trajectories: int, policy: str = DEFAULT_POLICY) -> Episode:
        """Record the failure in as many trajectories as its siblings have: no tokens, and why they ended.

        A group is complete when each of its episodes has ended, so the failed one takes its place too.
        """
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


class EpisodeError(SluiceError):
    """An environment failed: this rollout has no episode."""


def raised_by_environment(error: BaseException) -> BaseException | None:
    """Return what an environment's own code raised, whose traceback says where; None for other failures."""
    if isinstance(error, EpisodeError):
        return error.__cause__
    return None if isinstance(error, SluiceError) else error


class Environment(Protocol):
    """Lets a policy act on a task. One instance serves many rollouts at once."""

    trajectories_per_episode: int | None
    """How many every episode has, if that is always the same; None where it depends on the episode.

    Knowing it, an actor can hand over finished rollouts of a group while others run."""

    async def run(self, task: Task, policy: "Policy") -> Episode:
        """Roll `task` out once, recording on `policy.fresh(task.task_id)`: `policy` serves many rollouts.

        Raises SluiceError (EngineError, RewardError, ...) for a rollout that failed."""


@runtime_checkable
class ScoresGroups(Protocol):
    """An environment whose final rewards depend on all episodes of a group."""

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group, by sample, with their final rewards, or why they have none.

        It gets those that did not fail, once all of the group have ended. What it raises fails them all."""


@runtime_checkable
class RunsOnDemand(Protocol):
    """An environment whose rollouts are led from outside: leases are taken when somebody wants them."""

    @property
    def status(self) -> Mapping[str, Json]:
        """Return numbers for a screen."""

    async def open(self, stop: asyncio.Event) -> None:
        """Let others in. After `stop` what nobody has begun goes back by `HandBackError`."""

    async def leases_wanted(self, samples: int, timeout_s: float) -> int:
        """Return how many leases of so many rollouts are wanted, once some are or time is over."""


@runtime_checkable
class HandsBackAtStop(Protocol):
    """An environment whose rollouts may take longer than the end of a process: it does not finish them."""

    def stop_with(self, stop: asyncio.Event) -> None:
        """Begin no rollout after `stop`; those that go on a few seconds later raise `HandBackError`."""


@runtime_checkable
class CallsRewards(Protocol):
    """An environment that has rewards computed, and knows how long that takes."""

    @property
    def reward_times(self) -> tuple[CallTimes, ...]:
        """Return how long each of its rewards takes."""


@runtime_checkable
class Closable(Protocol):
    """An environment, or a part of one, that holds connections or processes."""

    async def close(self) -> None:
        """Give them up."""
