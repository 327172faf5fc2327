"""Scores stored answers with another reward, as an actor would."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.episodes.task import Answer, Task
from actors.policy.chat_format import ChatFormat
from actors.rewards.base import RewardError, Scored
from actors.rewards.scoring.answer_scoring import answer_to
from actors.rewards.scoring.scorers import GroupScorer, RewardChoice, Scorer
from bus.errors import ConfigError
from bus.messages import Prompt
from bus.trajectory import Trajectory
from storage.client.score_tables import Score


@dataclass
class Rescored:
    """New scores, and the failures."""

    scores: list[Score] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Reason for each trajectory that has no new score."""


async def rescore(
    group: Sequence[Trajectory],
    prompt: Prompt,
    chat: ChatFormat,
    scorer: Scorer | RewardChoice,
    into: Rescored,
    *,
    group_scorer: GroupScorer | None = None,
) -> None:
    """Score a group's answers to `prompt` into `into`. Raises `ConfigError` when they answer another."""
    trained = [trajectory for trajectory in group if trajectory.is_trained]
    answers = [answer_of(trajectory, prompt, chat) for trajectory in trained]
    left_out = [trajectory for trajectory in group if not trajectory.is_trained]
    into.failures += [f"{t.trajectory_id}: its rollout failed: there is no answer" for t in left_out]
    outcomes = await asyncio.gather(*map(scorer.scored, answers), return_exceptions=True)
    found: list[tuple[Trajectory, Answer]] = []
    for trajectory, answer, outcome in zip(trained, answers, outcomes, strict=True):
        if isinstance(outcome, RewardError):
            into.failures.append(str(outcome))
        elif isinstance(outcome, BaseException):
            raise outcome
        elif isinstance(outcome, Scored):
            found.append((trajectory, replace(answer, reward=outcome.reward)))
        else:
            into.failures.append(
                f"{trajectory.trajectory_id}: its new reward comes later: nothing waits for it"
            )
    if group_scorer is not None and found:
        found = await _final(found, group_scorer, into)
    into.scores += [
        Score(trajectory.trajectory_id, trajectory.reward, answer.reward)
        for trajectory, answer in found
        if answer.reward is not None
    ]


async def _final(
    found: Sequence[tuple[Trajectory, Answer]], group_scorer: GroupScorer, into: Rescored
) -> list[tuple[Trajectory, Answer]]:
    """Return the answers with their rewards within the group. Where the group reward fails, all do."""
    try:
        scored = await group_scorer.scored([answer for _, answer in found])
    except RewardError as error:
        into.failures += [f"{trajectory.trajectory_id}: {error}" for trajectory, _ in found]
        return []
    return [
        (trajectory, replace(answer, reward=final.reward))
        for (trajectory, answer), final in zip(found, scored, strict=True)
    ]


def answer_of(trajectory: Trajectory, prompt: Prompt, chat: ChatFormat) -> Answer:
    """Return the answer that the actor's reward function got. Raises `ConfigError` for a trajectory of
    another prompt, and for one of several turns, whose messages are not stored."""
    name = trajectory.trajectory_id
    task = Task.of(prompt, name)
    sampled = np.flatnonzero(trajectory.loss_mask)
    begin, end = int(sampled[0]), int(sampled[-1]) + 1
    if end - begin != len(sampled):
        raise ConfigError(f"{name} has several turns: only single-turn answers can be scored again")
    prompt_ids = chat.encode_chat(task.messages, task.tools)
    if tuple(trajectory.token_ids[:begin].tolist()) != prompt_ids:
        raise ConfigError(
            f"{name} does not answer the prompt that its lease has in these files: the prompts, their keys, "
            "data.shuffle, the seed or the tokenizer have changed since; give them as they were"
        )
    token_ids = trajectory.token_ids[begin:end].tolist()
    text = chat.decode(token_ids)
    return answer_to(task, text, trajectory.finish_reason, token_count=len(token_ids))
