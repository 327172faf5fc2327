"""Settings of the environment that replaces real rollouts in load tests. Loads without torch."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from actors.settings.environment import OneAnswerSettings
from bus.config import Config


class LogNormalLengths(Config):
    """Lengths whose logarithm is normal: most are short, a few are very long."""

    type: Literal["log_normal"] = "log_normal"
    median: float = Field(256.0, ge=1)
    """Median length in tokens; half of the answers are shorter."""
    sigma: float = Field(1.0, ge=0)
    """Standard deviation of the length's logarithm. At 1.0 one answer in a hundred is ten times the median or
    longer."""
    longest: int = Field(4096, ge=1)
    """Upper bound in tokens, to which longer draws are cut; at most sampling.max_new_tokens."""


class RecordedLengths(Config):
    """Lengths drawn from a recorded histogram."""

    type: Literal["recorded"] = "recorded"
    upper: tuple[int, ...] = Field(min_length=1)
    """Longest answer in each bin of the histogram, in tokens, rising. A bin begins above the one before it,
    the first at 1; lengths within a bin are alike. The last is at most sampling.max_new_tokens."""
    counts: tuple[float, ...] = Field(min_length=1)
    """Number of answers in each bin."""

    @property
    def longest(self) -> int:
        return self.upper[-1]

    @model_validator(mode="after")
    def _is_a_histogram(self) -> Self:
        if len(self.upper) != len(self.counts):
            raise ValueError(f"{len(self.upper)} bins in upper, {len(self.counts)} in counts: give as many")
        if self.upper[0] < 1 or any(b <= a for a, b in zip(self.upper, self.upper[1:], strict=False)):
            raise ValueError(f"upper={list(self.upper)} must rise from 1 or more")
        if min(self.counts) < 0 or sum(self.counts) <= 0:
            raise ValueError(f"counts={list(self.counts)} must be 0 or more, and not all of them 0")
        return self


LengthsConfig = Annotated[LogNormalLengths | RecordedLengths, Field(discriminator="type")]


class LengthProfileConfig(OneAnswerSettings):
    """Answers of forced length with random rewards, for load tests: weights may be random."""

    type: Literal["length_profile"] = "length_profile"
    built_by: ClassVar[str] = "actors.environments.length_profile:LengthProfile"
    has_own_rewards: ClassVar[bool] = True
    lengths: LengthsConfig = LogNormalLengths()
    """Distribution of the answers' lengths; it is log_normal where no type is named."""
    seed: int = Field(0, ge=0)
    """Seed of lengths and rewards: a sample of a prompt has the same length and reward in every rollout."""

    @property
    def longest_answer(self) -> int:
        return self.lengths.longest

    @field_validator("lengths", mode="before")
    @classmethod
    def _name_the_profile(cls, given: object) -> object:
        return {"type": "log_normal", **given} if isinstance(given, Mapping) else given
