"""Makes an episode of a gateway's session, with the reward that was posted or that a function computes."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import structlog

from actors.episodes.episode import Episode
from actors.episodes.errors import FAULT_FRACTION, LONGEST_FAULT, REWARD_FAULT
from actors.episodes.task import JSON, Task
from actors.gateway.posted_reward import PostedReward
from actors.gateway.session import Session
from actors.policy.messages import Completion
from actors.policy.policy import Policy
from actors.rewards.base import RewardError
from actors.rewards.scoring.answer_scoring import AnswerScoring, answer_to
from actors.settings.agents import POSTED
from actors.settings.rewards import RewardConfig
from bus.codec import Json

log = structlog.get_logger()
REFUSED_REWARDS = "refused_rewards"
"""Entry of the metadata of trajectories whose agent posted a reward without the key for it."""
END_CAUSE = "end_cause"
"""Entry of the metadata of trajectories whose episode the gateway ended: why."""


class UnpaidError(RewardError):
    """Nobody posted a reward for an episode, or for one of its agents."""


class TaskDescriptions:
    """Describes tasks to agents without what tells the answer, since the policy may read what they read."""

    def __init__(self, shown_metadata: Collection[str]) -> None:
        self._shown = shown_metadata
        self._has_told = False

    def of(self, task: Task) -> dict[str, JSON]:
        """Return a task with the fields of its metadata that the settings name. Others are told once."""
        kept_back = sorted(task.metadata.keys() - set(self._shown))
        if kept_back and not self._has_told:
            self._has_told = True
            log.info(
                "metadata_is_not_shown",
                fields=kept_back,
                remedy="where the agent needs a field that does not tell the answer, name it in "
                "actors.environment.shown_metadata",
            )
        shown = {name: task.metadata[name] for name in self._shown if name in task.metadata}
        return with_metadata(task, shown)


def with_metadata(task: Task, metadata: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return a task without its label, and with these fields for its metadata."""
    tools: dict[str, JSON] = {"tools": list(task.tools)} if task.tools else {}
    return {"task_id": task.task_id, "prompt": task.prompt, "metadata": dict(metadata), **tools}


def scoring_of(config: RewardConfig) -> AnswerScoring | None:
    """Return what computes the rewards of sessions; None where these are posted. Raises `ConfigError` for one
    that cannot be loaded."""
    return None if config.reward == POSTED else AnswerScoring.from_config(config)


def metrics_of(session: Session) -> dict[str, float]:
    return {f"gateway/{name}": float(count) for name, count in session.counts.items()}


def noted(session: Session) -> dict[str, Json]:
    """Return what is kept with each trajectory of a session: how often its agent tried to pay itself, and why
    the gateway ended its episode."""
    refused = session.counts["refused_rewards"]
    found: dict[str, Json] = {REFUSED_REWARDS: refused} if refused else {}
    return {**found, END_CAUSE: session.end_cause} if session.end_cause else found


def posted_episode(
    policy: Policy, session: Session, posted: PostedReward, metadata: Mapping[str, Json] | None = None
) -> Episode:
    """Return what was recorded with a reward that was posted. Raises UnpaidError for one that leaves agents
    out."""
    value = posted.value
    if isinstance(value, Mapping) and (missing := session.agents - set(value)):
        raise UnpaidError(f"the posted reward names no {', '.join(sorted(missing))}: name every agent")
    recorded = policy.trajectories(value, end=session.end, reward_components=posted.components)
    kept = {**noted(session), **(metadata or {})}
    parts = (
        replace(part, metadata={**part.metadata, **kept}, reward_source=session.reward_source)
        for part in recorded
    )
    metrics = {**metrics_of(session), FAULT_FRACTION: float(REWARD_FAULT in kept)}
    return Episode(tuple(parts), metrics, outcome=posted.outcome)


def unscored_episode(
    policy: Policy, session: Session, lowest: float, fault: str, metadata: Mapping[str, Json] | None = None
) -> Episode:
    """Return what was recorded with the lowest reward, since the policy kept it from being scored."""
    session.reward_source = "settings"
    noted_fault = {**(metadata or {}), REWARD_FAULT: fault[:LONGEST_FAULT]}
    return posted_episode(policy, session, PostedReward(reward=lowest), noted_fault)


async def scored_episode(
    scoring: AnswerScoring, policy: Policy, session: Session, task: Task, last: Completion,
    metadata: Mapping[str, Json] | None = None, found: Mapping[str, JSON] | None = None,
) -> Episode:  # fmt: skip
    """Return what was recorded with the reward of the last answer, which also sees what was `found` besides;
    raises RewardError."""
    stopped = session.end is None and last.finish_reason == "stop"
    answer = answer_to(
        task,
        str(last.message["content"]),
        "stop" if stopped else "length",
        token_count=session.counts["tokens"],
    )
    answer = replace(answer, metadata={**answer.metadata, **(found or {})})
    return await scoring.episode(
        policy, answer, metrics_of(session), end=session.end, metadata={**noted(session), **(metadata or {})}
    )
