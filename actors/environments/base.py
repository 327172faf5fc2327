"""What a rollout starts from and what it leaves behind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from bus.codec import Json
from bus.errors import SchemaError, SluiceError
from bus.trajectory import DEFAULT_POLICY, TRUSTED_ENDS, YOUNGEST, End, Turn

if TYPE_CHECKING:
    from actors.policy.policy import Policy

DEFAULT_AGENT = "solver"
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
    metadata: Mapping[str, Json] = field(default_factory=dict)
    """What else is worth keeping with it."""
    routed_experts: np.ndarray | None = None
    """uint8 [L - 1, layers, experts per token], as `Generation` has it: the last token has no row."""

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
    """Numbers to log, by `area/name_unit`."""


@dataclass(frozen=True, slots=True)
class FailedEpisode:
    """A rollout that something around the policy ended, so that no reward says anything about it."""

    end: End
    reason: str
    """What went wrong, for people."""

    def as_episode(self, trajectories: int) -> Episode:
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
class Closable(Protocol):
    """An environment, or a part of one, that holds connections or processes."""

    async def close(self) -> None:
        """Give them up."""
