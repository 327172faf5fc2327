"""Agents of one policy that debate a task in rounds, until a judge decides."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from actors.environments.agent_answers import lettered, names_of, number_of_letter, reward_now
from actors.episodes.episode import Episode
from actors.episodes.errors import EpisodeError
from actors.episodes.task import ChatMessage, Task
from actors.policy.messages import UNANSWERABLE, Completion
from actors.policy.policy import Policy
from actors.rewards.scoring.scorers import RewardChoice, Scorer
from actors.settings.panel import SELF, VOTE, DebateConfig
from actors.tools.prompt_tools import refuse_tools
from bus.policy_names import DEFAULT_POLICY
from bus.streams.publish import together

JUDGE = "judge"


@dataclass(slots=True)
class Debater:
    """One side of a debate while it goes on."""

    agent: str
    chat: list[ChatMessage]
    answers: list[Completion]
    """The debater's answers so far, one a round."""
    is_full: bool = False
    """Whether the context has no room for another answer; then the last one stands."""

    @property
    def position(self) -> str:
        """Return the latest answer."""
        return self.answers[-1].content.strip()


class Debate:
    """Every debater is rewarded for its last answer, and a judge that is trained for the one it chose. Each
    debater has a chat of its own, which grows by a turn a round: what it answered before it saw others is
    part of the trajectory that its last answer is rewarded for."""

    trajectories_per_episode: int | None = None
    """A chat template may rewrite earlier turns, and then an episode has more of them."""

    def __init__(self, config: DebateConfig, scorer: Scorer | RewardChoice) -> None:
        self._config = config
        self._scorer = scorer
        self.reward_times = scorer.times

    @classmethod
    def from_config(cls, config: DebateConfig) -> Self:
        """Build with the configured reward; raises ConfigError for one that cannot be loaded."""
        return cls(config, RewardChoice.from_config(config))

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once. Raises EngineError or RewardError for a rollout that failed, and EpisodeError
        for a judge that is not there."""
        refuse_tools(task, "debate")
        policy, asked = policy.fresh(task.task_id), self._config
        if unknown := set(asked.opponents_named) - policy.opponents:
            raise EpisodeError(f"there is no opponent {min(unknown)!r}: define it in actors.opponents")
        debaters = [Debater(name, [*task.messages], []) for name in names_of("debater", asked.debaters)]
        for _ in range(asked.rounds):
            await self._round(debaters, policy)
        rewards = await together(
            reward_now(self._scorer, task, debater.answers[-1], "a debate") for debater in debaters
        )
        winner = await self._decided(task, debaters, policy)
        outcome = 0.0 if winner is None else rewards[winner]
        decided = None if winner is None else debaters[winner].position
        shares = {
            debater.agent: reward
            + asked.decision_weight * outcome
            + asked.win_weight * (debater.position == decided)
            for debater, reward in zip(debaters, rewards, strict=True)
        }
        parts = {"solved": sum(rewards) / len(rewards), "agreed": _agreed(debaters), "outcome": outcome}
        recorded = policy.trajectories({**shares, JUDGE: outcome}, reward_components=parts)
        return Episode(
            recorded, {"rollout/reward": outcome, "rollout/agreed": parts["agreed"]}, outcome=outcome
        )

    async def close(self) -> None:
        await self._scorer.close()

    async def _round(self, debaters: Sequence[Debater], policy: Policy) -> None:
        """Have all answer at once, each having seen the answers of the round before."""
        if debaters[0].answers:
            said = [(number, debater.position) for number, debater in enumerate(debaters)]
            for number, debater in enumerate(debaters):
                others = lettered(one for one in said if one[0] != number)
                content = self._config.reply_prompt.format_map({"answers": others})
                debater.chat += [debater.answers[-1].message, {"role": "user", "content": content}]
        await together(_answer(debater, policy) for debater in debaters if not debater.is_full)

    async def _decided(self, task: Task, debaters: Sequence[Debater], policy: Policy) -> int | None:
        """Return the number of the debater whose answer the judge decided on; None if it chose none, or could
        not read them all."""
        if self._config.decided_by == VOTE:
            votes = Counter(debater.position for debater in debaters)
            return max(range(len(debaters)), key=lambda number: (votes[debaters[number].position], -number))
        *before, last = task.messages
        answers = lettered((number, debater.position) for number, debater in enumerate(debaters))
        filled = {"prompt": str(last["content"]), "answers": answers}
        judge = DEFAULT_POLICY if self._config.decided_by == SELF else self._config.decided_by
        question = {**last, "content": self._config.judge_prompt.format_map(filled)}
        try:
            choice = await policy.chat([*before, question], JUDGE, policy=judge)
        except UNANSWERABLE:  # all answers do not fit: long ones are to cost something
            return None
        return number_of_letter(choice.content, len(debaters))


async def _answer(debater: Debater, policy: Policy) -> None:
    try:
        debater.answers.append(await policy.chat(debater.chat, debater.agent))
    except UNANSWERABLE:
        if not debater.answers:
            raise  # the prompt itself cannot be answered
        debater.is_full = True


def _agreed(debaters: Sequence[Debater]) -> float:
    """Return the fraction of the debaters that end with the most frequent answer."""
    votes = Counter(debater.position for debater in debaters)
    return max(votes.values()) / len(debaters)
