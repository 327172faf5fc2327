"""Settings of the environment that runs a program of somebody's for each episode. Loads without torch."""

import shlex
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from actors.gateway.config import GatewayConfig
from actors.rewards.config import RewardConfig

POSTED = "posted"
"""Name of the reward that a program posts."""


class AgentConfig(RewardConfig):
    """Environment in which each episode is a program, which asks the policy as it would ask OpenAI's or
    Anthropic's servers.

    The reward is computed from the policy's last answer, or it is named `posted`: then each program posts its
    own, at most `reward_timeout_s` after it has ended."""

    type: Literal["agent"] = "agent"
    """Name of the environment."""

    command: str
    """Command of the program, such as `python my_agent.py`. No shell reads it."""

    program_timeout_s: float = Field(600.0, gt=0)
    """Longest time that a program may take; then it is ended, and its episode fails."""

    programs_at_once: int = Field(32, ge=1)
    """Most programs that run at the same time; further episodes wait."""

    unfinished_reward: float | None = None
    """Reward of an episode that a limit of the gateway ended before its program posted one. With None such an
    episode fails, and is not trained."""

    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the program, besides those of the actor and those by which it finds the
    policy."""

    most_output_bytes: int = Field(16 << 20, ge=1024)
    """Output of a program after which it is ended, and its episode fails; the log shows the end of it."""

    gateway: GatewayConfig = GatewayConfig()
    """HTTP server that the programs ask."""

    @property
    def arguments(self) -> list[str]:
        """Return the command in words."""
        return shlex.split(self.command)

    @field_validator("command")
    @classmethod
    def _has_words(cls, command: str) -> str:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"no command that can be split into words: {error}") from error
        if not words:
            raise ValueError("an empty command: name the program, such as 'python my_agent.py'")
        return command

    @model_validator(mode="after")
    def _answers_have_no_reasoning(self) -> Self:
        self.refuse_reasoning_rewards()
        return self

    @model_validator(mode="after")
    def _posted_rewards_are_final(self) -> Self:
        if self.reward == POSTED and (self.rewards or self.group_reward):
            raise ValueError(
                "reward=posted takes what each program posts: leave out rewards and group_reward, or name "
                "another reward"
            )
        return self
