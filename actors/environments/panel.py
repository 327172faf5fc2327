"""Solvers, rewriters and a selector: agents of one policy that answer a task together."""

from collections.abc import Mapping, Sequence
from typing import Self

from actors.environments.agent_answers import lettered, names_of, number_of_letter, reward_now
from actors.episodes.episode import Episode
from actors.episodes.task import ChatMessage, Task
from actors.policy.messages import UNANSWERABLE, Completion
from actors.policy.policy import Policy
from actors.rewards.scoring.scorers import RewardChoice, Scorer
from actors.settings.panel import PanelConfig
from actors.tools.prompt_tools import refuse_tools
from bus.streams.publish import together

SELECTOR = "selector"


class Panel:
    """Every agent is rewarded for its own answer, and the selector for the one that it chose. Agents have
    names of their own (`solver-1`, ...), so that each is compared with itself in the other rollouts of the
    prompt."""

    def __init__(self, config: PanelConfig, scorer: Scorer | RewardChoice) -> None:
        self._config = config
        self._scorer = scorer
        self.reward_times = scorer.times
        self.trajectories_per_episode: int | None = config.trajectories_per_rollout

    @classmethod
    def from_config(cls, config: PanelConfig) -> Self:
        """Build with the configured reward; raises ConfigError for one that cannot be loaded."""
        return cls(config, RewardChoice.from_config(config))

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once; raises EngineError or RewardError for a rollout that failed."""
        refuse_tools(task, "panel")
        policy, asked = policy.fresh(task.task_id), self._config
        drafts = await together(
            policy.chat(task.messages, agent) for agent in names_of("solver", asked.solvers)
        )
        rewritten = await together(
            _shown(policy, task, asked.rewriter_prompt, drafts, agent)
            for agent in names_of("rewriter", asked.rewriters)
        )
        choice = await _shown(policy, task, asked.selector_prompt, rewritten, SELECTOR)
        rewards = await together(
            reward_now(self._scorer, task, answer, "a panel") for answer in [*drafts, *rewritten]
        )
        outcome = _chosen(choice, rewards[asked.solvers :])
        agents = [*names_of("solver", asked.solvers), *names_of("rewriter", asked.rewriters)]
        shares = {
            agent: reward + asked.outcome_weight * outcome
            for agent, reward in zip(agents, rewards, strict=True)
        }
        parts = {
            "solved": sum(rewards[: asked.solvers]) / asked.solvers,
            "rewritten": sum(rewards[asked.solvers :]) / asked.rewriters,
            "outcome": outcome,
        }
        recorded = policy.trajectories({**shares, SELECTOR: outcome}, reward_components=parts)
        return Episode(recorded, {"rollout/reward": outcome}, outcome=outcome)

    async def close(self) -> None:
        await self._scorer.close()


async def _shown(
    policy: Policy, task: Task, template: str, answers: Sequence[Completion], agent: str
) -> Completion:
    """Ask an agent that sees the answers of others; it sees empty ones where what they wrote cannot be shown,
    such as too long a text. So no agent can have the episode of all left out of training."""
    try:
        return await policy.chat(_last_replaced(task, template, [one.content for one in answers]), agent)
    except UNANSWERABLE:
        return await policy.chat(_last_replaced(task, template, [""] * len(answers)), agent)


def _last_replaced(task: Task, template: str, answers: Sequence[str]) -> Sequence[ChatMessage]:
    *before, last = task.messages
    filled: Mapping[str, str] = {"prompt": str(last["content"]), "answers": lettered(enumerate(answers))}
    return [*before, {**last, "content": template.format_map(filled)}]


def _chosen(choice: Completion, rewards: Sequence[float]) -> float:
    """Return the reward of the answer whose letter was written; 0 for any other text."""
    number = number_of_letter(choice.content, len(rewards))
    return 0.0 if number is None else rewards[number]
