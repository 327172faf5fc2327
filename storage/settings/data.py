"""Settings of a run's prompts: their files, the sources that are mixed, and curricula over them."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config
from bus.process.plugins import names_function


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


class _Curriculum(Config):
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


class BandCurriculum(_Curriculum):
    """Prefers sources whose success lies within a band, as filters of difficulty do (arXiv:2504.03380)."""

    type: Literal["band"] = "band"
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


class PromptKeys(Config):
    """Names of the fields in prompt files."""

    prompt: str = "prompt"
    """Field of the prompt: plain text, or chat messages [{"role": ..., "content": ...}, ...]."""
    label: str = "label"
    """Field that the reward compares answers with; it may be absent."""
    metadata: str = "metadata"
    """Field of an object for the reward and the environment; it may be absent."""
    tools: str = "tools"
    """Field of the functions that the model is offered, in the shape of OpenAI's `tools`: a list, or a JSON
    text of one. It may be absent; an empty name means that no field is read."""


class SamplerConfig(Config):
    """A function of the user's own that decides which prompts come next."""

    function: str | None = None
    """The function, as `my_pkg.my_module:function`; the working directory counts. `None` leaves the order to
    `shuffle`."""
    settings: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments that the function gets besides."""


class DataConfig(Config):
    """The prompts to train on and the held-out prompts to measure with."""

    prompts: Path | None = None
    """File of training prompts, .jsonl or .parquet, or a data set of the Hugging Face hub, as
    hf://ORGANISATION/NAME/SPLIT. Without it the task's own generator writes one. A function of your own,
    as `my_pkg.my_module:function`, yields prompts for as long as the run wants some."""
    sources: tuple[SourceConfig, ...] = ()
    """Several files of training prompts that are mixed by weights, instead of `prompts`."""
    curriculum: CurriculumConfig = NoCurriculum()
    """How the shares of the sources, or of their buckets, follow the policy's success."""
    solved_at: float = Field(1.0, allow_inf_nan=False)
    """Reward from which a rollout counts as having solved its prompt, in the numbers by source."""
    heldout: Path | None = None
    """File of held-out prompts, as for training. Without it the generator of the run's task writes one."""
    task: str | None = None
    """Built-in task that generates prompts, held-out prompts and demonstrations: sort, addition, product,
    guess, nim, panel, debate, python, retool, repair, repositories, search or shop; or `reasoning_gym/NAME`.
    The latter and repositories have no demonstrations."""
    keys: PromptKeys = PromptKeys()
    """Names of the fields in prompt files."""
    shuffle: bool = True
    """Whether each epoch visits the prompts in another order, drawn from the run's seed."""
    sampler: SamplerConfig = SamplerConfig()
    """What decides which prompts come next, in place of `shuffle`."""
    long_prompts: Literal["refuse", "skip"] = "refuse"
    """What is done about prompts that leave no room for an answer in the model's context: `refuse` ends the
    run before its first rollout, `skip` leaves them out, counted as quarantined prompts."""

    @property
    def is_stream(self) -> bool:
        """Tell whether the prompts come from a function, as they are needed."""
        return self.prompts is not None and names_function(self.prompts)

    @model_validator(mode="after")
    def _sources_are_apart(self) -> Self:
        names = [source.name for source in self.sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sources are named {twice[0]!r}: give each a name of its own")
        if self.sources and self.prompts is not None:
            raise ValueError(
                f"prompts={str(self.prompts)!r} beside sources: make that file one of the sources, or leave "
                "one of them out"
            )
        if self.sampler.function is not None and (self.is_stream or self.sources):
            raise ValueError(
                f"sampler={self.sampler.function!r} chooses among the prompts of one file: give that as "
                "prompts, not as a function or in sources, or leave out the sampler"
            )
        buckets = any(source.buckets for source in self.sources)
        if self.curriculum.type != "none" and len(self.sources) < 2 and not buckets:
            raise ValueError(
                f"curriculum moves shares between sources, of which there are {len(self.sources)}: give two "
                "data.sources, or one with buckets; or leave out the curriculum"
            )
        return self
