"""Makes an episode of a gateway's session, with the reward that was posted or that a function computes."""

from collections.abc import Mapping
from dataclasses import replace

from actors.episodes.episode import Episode
from actors.episodes.task import Task
from actors.gateway.posted_reward import PostedReward
from actors.gateway.session import Session
from actors.policy.messages import Completion
from actors.policy.policy import Policy
from actors.rewards.base import RewardError
from actors.rewards.scoring.answer_scoring import AnswerScoring, answer_to
from actors.settings.agents import POSTED
from actors.settings.rewards import RewardConfig
from bus.codec import Json

REFUSED_REWARDS = "refused_rewards"
"""Entry of the metadata of trajectories whose agent posted a reward without the key for it."""


def scoring_of(config: RewardConfig) -> AnswerScoring | None:
    """Return what computes the rewards of sessions; None where these are posted.

    Raises `ConfigError` for one that cannot be loaded."""
    return None if config.reward == POSTED else AnswerScoring.from_config(config)


def metrics_of(session: Session) -> dict[str, float]:
    """Return the numbers of a session."""
    return {f"gateway/{name}": float(count) for name, count in session.counts.items()}


def noted(session: Session) -> dict[str, Json]:
    """Return what is kept with each trajectory of a session: how often its agent tried to pay itself."""
    refused = session.counts["refused_rewards"]
    return {REFUSED_REWARDS: refused} if refused else {}


def posted_episode(
    policy: Policy, session: Session, posted: PostedReward, metadata: Mapping[str, Json] | None = None
) -> Episode:
    """Return what was recorded with a reward that was posted. Raises RewardError for one that leaves agents
    out."""
    value = posted.value
    if isinstance(value, Mapping) and (missing := session.agents - set(value)):
        raise RewardError(f"the posted reward names no {', '.join(sorted(missing))}: name every agent")
    recorded = policy.trajectories(value, end=session.end, reward_components=posted.components)
    kept = {**noted(session), **(metadata or {})}
    parts = (
        replace(part, metadata={**part.metadata, **kept}, reward_source=session.reward_source)
        for part in recorded
    )
    return Episode(tuple(parts), metrics_of(session), outcome=posted.outcome)


async def scored_episode(
    scoring: AnswerScoring, policy: Policy, session: Session, task: Task, last: Completion,
    metadata: Mapping[str, Json] | None = None,
) -> Episode:  # fmt: skip
    """Return what was recorded with the reward of the last answer; raises RewardError."""
    stopped = session.end is None and last.finish_reason == "stop"
    answer = answer_to(
        task,
        str(last.message["content"]),
        "stop" if stopped else "length",
        token_count=session.counts["tokens"],
    )
    return await scoring.episode(
        policy, answer, metrics_of(session), end=session.end, metadata={**noted(session), **(metadata or {})}
    )
