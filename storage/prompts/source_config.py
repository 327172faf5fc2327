"""Settings of the sources of a run's training prompts, and of curricula over them. Loads without torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config


class SourceConfig(Config):
    """One of several files of training prompts, and its share of them."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")
    """Name of the source on screens and in metrics: letters, digits, - and _."""

    prompts: Path
    """File of prompts, .jsonl or .parquet, or a slice of one."""

    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Share of the prompts that come from this source, relative to the weights of the others."""

    reward: str | None = None
    """Reward of its prompts, unless their metadata choose another. The run must allow it:
    `reward` or `rewards` of its environment. `None` leaves it to the prompts."""

    environment: str | None = None
    """Environment of its prompts, one of `actors.environments`, unless their metadata choose another. `None`
    leaves it to the prompts, and is `actors.environment` where they choose none."""

    buckets: str | None = None
    """Field of the prompts' metadata, such as a level of difficulty, that divides the source: each value
    becomes a source of its own, `name=value`, with a share of the weight by its number of prompts."""


class NoCurriculum(Config):
    """Leaves the shares as they are configured."""

    type: Literal["none"] = "none"
    """Name of the curriculum."""


class _Curriculum(Config):
    """Base of the curricula: how success is measured, and how far shares may move."""

    every_groups: int = Field(256, ge=1)
    """Groups with known rewards from one change of the shares to the next."""

    memory_groups: float = Field(64.0, ge=1)
    """Groups over which a source's success is averaged: each counts 1 - 1/memory_groups as much as the next
    one."""

    floor: float = Field(0.1, gt=0, le=1)
    """Part of its configured share that a source keeps, whatever its success; 1 changes nothing."""


class LearnabilityCurriculum(_Curriculum):
    """Prefers sources in proportion to p (1 - p), where p is the fraction of rollouts that solve them: the
    variance of a reward of 0 or 1, without which a group teaches nothing (arXiv:2502.12272, section 3)."""

    type: Literal["learnability"] = "learnability"
    """Name of the curriculum."""


class BandCurriculum(_Curriculum):
    """Prefers sources whose success lies within a band, as filters of difficulty do (arXiv:2504.03380)."""

    type: Literal["band"] = "band"
    """Name of the curriculum."""

    low: float = Field(0.2, ge=0, le=1)
    """Lower end of the band. Below it the preference falls in proportion, to 0 where nothing is solved."""

    high: float = Field(0.8, ge=0, le=1)
    """Upper end of the band. Above it the preference falls in proportion, to 0 where all is solved."""

    @model_validator(mode="after")
    def _the_band_is_one(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}: exchange them")
        return self


Curriculum = LearnabilityCurriculum | BandCurriculum
CurriculumConfig = Annotated[NoCurriculum | Curriculum, Field(discriminator="type")]
