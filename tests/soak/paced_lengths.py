"""Rollouts of a known distribution of lengths, in which long ones take long: what kills would bias."""

import asyncio

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from actors.environments.length_profile import LengthProfile
from actors.episodes.episode import Episode
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.settings.length_profile import LengthProfileConfig, RecordedLengths

LONGEST = 40
LENGTHS = RecordedLengths(upper=(LONGEST,), counts=(1.0,))
"""Uniform from 1 to `LONGEST`."""


class PacedLengths(LengthProfile):
    """A length profile whose samples take as long as they have tokens. A sample of a prompt has the same
    length in every attempt."""

    class Settings(BaseModel):
        """Settings of `actors.environment.settings`."""

        token_s: float = Field(0.05, ge=0)
        """Time that each token takes beside the engine's: by default the longest rollout takes 2 s."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(LengthProfileConfig(lengths=LENGTHS))
        self._token_s = settings.token_s

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once; raises EngineError."""
        await asyncio.sleep(self.length(task.task_id) * self._token_s)
        return await super().run(task, policy)


def expected_lengths(count: int) -> NDArray[np.int64]:
    """Return so many lengths, evenly from the distribution."""
    return np.arange(count) % LONGEST + 1
