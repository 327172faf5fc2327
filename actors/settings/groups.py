"""Settings of the groups of an actor: which are kept, and how often failed rollouts are repeated. Loads
without torch and numpy."""

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from bus.config import Config

if TYPE_CHECKING:  # loads numpy, and --help is to be quick
    from bus.trajectory import End


class GroupLimitsConfig(Config):
    """Bounds that keep groups from which little can be learnt from being trained on.

    They hold for each agent. A group is rejected when no agent's part of it is within them."""

    mean_reward_min: float | None = Field(None, allow_inf_nan=False)
    """Least mean reward; a group below it is rejected as `reward_too_low`."""
    mean_reward_max: float | None = Field(None, allow_inf_nan=False)
    """Largest mean reward; a group above it is rejected as `reward_too_high`."""
    mean_tokens_min: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Least mean number of sampled tokens of an episode; a group below it is rejected as `too_short`."""
    mean_tokens_max: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Largest mean number of sampled tokens of an episode; a group above it is rejected as `too_long`."""
    drop_all_truncated: bool = False
    """Whether a group all of whose episodes were cut off at a limit of tokens or turns is rejected, as
    `all_truncated`."""

    @model_validator(mode="after")
    def _can_be_kept(self) -> Self:
        for name in ("mean_reward", "mean_tokens"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low is not None and high is not None and low > high:
                raise ValueError(f"{name}_min={low:g} above {name}_max={high:g} would reject every group")
        return self


class RetriesConfig(Config):
    """How often a rollout that failed is repeated under the same lease before it counts as failed.

    It is repeated with the same seeds, so that the repetition favours no other answers."""

    timeout: int = Field(0, ge=0)
    """Repetitions of a rollout that took too long."""
    environment_error: int = Field(0, ge=0)
    """Repetitions of a rollout whose environment failed."""
    tool_error: int = Field(0, ge=0)
    """Repetitions of a rollout that a tool failed."""
    reward_error: int = Field(0, ge=0)
    """Repetitions of a rollout whose reward failed; the answer is sampled again, too."""
    engine_error: int = Field(0, ge=0)
    """Repetitions of a rollout whose engine failed, beyond those of the fleet."""

    def of(self, end: "End") -> int:
        """Return how often a rollout is repeated that ended so."""
        return int(getattr(self, end, 0))


class FailureLimitsConfig(Config):
    """When failures of rewards, environments and tools end the run, each environment by itself.

    They are of the run's own code and of services that it asks, such as a judge. Failures of engines count
    nowhere here, and time limits only until a rollout of the environment has ended well."""

    fraction: float | None = Field(0.5, gt=0, le=1)
    """Fraction of the latest rollouts that fail at which the run ends; 1 waits until all do. `None` ends no
    run, and screens alone show the failures."""
    rollouts: int = Field(100, ge=1)
    """Number of latest rollouts among which that fraction is."""
    at_least: int = Field(16, ge=1)
    """Fewest rollouts that are judged."""
    after_s: float = Field(120.0, ge=0)
    """Time for which so many fail before the run ends: what a judge or a server may be away."""


class InterruptionConfig(Config):
    """What becomes of rollouts that an actor does not end: another one goes on from their turns."""

    finish_within_s: float = Field(30.0, ge=0)
    """Longest time that rollouts may go on once the actor is told to stop. Then they are interrupted, and
    their turns and tokens are stored for the actor that takes their leases next."""
    keep_turns_every_s: float | None = Field(60.0, gt=0)
    """Time between two moments at which new turns of rollouts that go on are stored, so that an actor's death
    costs only what came since. `None` stores them only when the actor ends."""
