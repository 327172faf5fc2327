"""What the settings of each environment say of it, so that nobody asks which environment it is."""

from collections.abc import Collection
from typing import ClassVar

from actors.settings.episode_sandboxes import EpisodeSandboxes
from actors.settings.gateway import GatewayConfig
from bus.config import Config


class EnvironmentSettings(Config):
    """Settings of an environment, whose class is its record; the defaults hold for one that only its own code
    or a program knows."""

    type: str
    """Name of the environment."""
    built_by: ClassVar[str]
    """What builds the environment from these settings, as `module:function`. The name is text, because
    settings load quickly."""
    finishes_after_stop: ClassVar[bool] = False
    """The environment is told how long its episodes get to end after a stop, as `finish_within_s`."""
    shows_tools: ClassVar[bool] = True
    """The environment offers the tools of a prompt to the policy, or leaves them to its own code."""
    has_own_rewards: ClassVar[bool] = False
    """The environment's rewards are its own, whatever the settings of a source name."""
    scores_one_answer: ClassVar[bool] = False
    """The reward is that of one answer, which can be computed again from a recorded trajectory."""
    takes_leases_on_demand: ClassVar[bool] = False
    """Leases are taken when somebody from outside asks, never for held-out prompts. What builds it is told
    what such clients must know to take tasks, as `token`, which is None where they need nothing."""

    @property
    def agents_gateway(self) -> GatewayConfig | None:
        """Return the settings of the server by which agents ask the policy; None without one."""
        return None

    @property
    def public_gateway(self) -> GatewayConfig | None:
        """Return the settings of a server for agents that others start; None without one."""
        return self.agents_gateway if self.takes_leases_on_demand else None

    @property
    def known_tools(self) -> Collection[str] | None:
        """Return the names of all tools that it can carry out; None where only its own code knows."""
        return None

    @property
    def sandboxes(self) -> EpisodeSandboxes | None:
        """Return the settings of its episodes' sandboxes; None where episodes have none."""
        return None

    @property
    def reads_native_calls(self) -> bool:
        return False

    def lets_opponent_play(self, agent: str) -> bool:
        return False

    opponent_setting: ClassVar[str] = "opponent"
    """Setting that names an opponent."""

    @property
    def opponents_named(self) -> tuple[str, ...]:
        """Return the names among `actors.opponents` and `policies` that it needs."""
        return ()

    @property
    def agent_names(self) -> tuple[str, ...] | None:
        """Return the names of its agents; None where the settings do not say them."""
        return None

    @property
    def trajectories_per_rollout(self) -> int | None:
        """Return the most trajectories of a rollout; None where that depends on the rollout."""
        return None

    @property
    def longest_answer(self) -> int:
        """Return the tokens that its longest answer needs; 0 where it takes what `sampling` allows."""
        return 0


class OneAnswerSettings(EnvironmentSettings):
    """Settings of an environment in which a rollout is one answer of one agent."""

    @property
    def agent_names(self) -> tuple[str, ...]:
        return ("solver",)

    @property
    def trajectories_per_rollout(self) -> int:
        return 1
