"""What the settings of each environment say of it, so that nobody asks which environment it is."""

from typing import ClassVar

from bus.config import Config


class EnvironmentSettings(Config):
    """Settings of an environment; the defaults hold for one that only its own code or a program knows."""

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
