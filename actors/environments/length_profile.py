"""Answers of forced length with random rewards: what a system carries, apart from what a model has learnt."""

from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate
from math import ceil, exp
from statistics import NormalDist

from actors.episodes.draws import uniform_draw
from actors.episodes.episode import Episode
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.settings.length_profile import LengthProfileConfig, LogNormalLengths, RecordedLengths


class LengthProfile:
    """Has each sample of a task answered in so many tokens as its name draws from the profile. No token ends
    an answer, so lengths do not depend on the weights. Rewards are uniform in [0, 1): every group has some
    variance, and nothing is learnt."""

    trajectories_per_episode: int | None = 1

    def __init__(self, config: LengthProfileConfig) -> None:
        self._config = config

    def length(self, task_id: str) -> int:
        """Return the number of tokens of this sample's answer: the same in every process."""
        return length_at(self._config.lengths, uniform_draw(f"{self._config.seed}/length/{task_id}"))

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once; raises EngineError, also where the length exceeds the model's context."""
        policy = policy.fresh(task.task_id)
        length = self.length(task.task_id)
        # no stop token, and so SGLang's ignore_eos: its min_new_tokens needs a tokenizer, which it has not
        policy.sampling = replace(policy.sampling, max_new_tokens=length, stop_token_ids=())
        await policy.chat(task.messages, tools=task.tools or None)
        reward = uniform_draw(f"{self._config.seed}/reward/{task.task_id}")
        return Episode(
            trajectories=policy.trajectories(reward),
            metrics={"rollout/reward": reward, "rollout/completion_tokens": float(length)},
        )


def length_at(lengths: LogNormalLengths | RecordedLengths, share: float) -> int:
    """Return the length, >= 1 tokens, that this share of answers does not exceed."""
    if isinstance(lengths, LogNormalLengths):
        drawn = lengths.median * exp(lengths.sigma * NormalDist().inv_cdf(share))
        return min(max(1, round(drawn)), lengths.longest)
    below = [0.0, *accumulate(lengths.counts)]
    wanted = share * below[-1]
    number = bisect_left(below, wanted) - 1
    first = lengths.upper[number - 1] if number else 0
    within = (wanted - below[number]) / lengths.counts[number]
    return min(max(first + ceil(within * (lengths.upper[number] - first)), first + 1), lengths.upper[number])
