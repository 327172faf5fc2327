"""Settings of prompts, admission, replay and metrics. Loads without torch."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config
from bus.errors import ConfigError
from storage.prompts.source_config import CurriculumConfig, NoCurriculum, SourceConfig


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


class DataConfig(Config):
    """The prompts to train on and the held-out prompts to measure with."""

    prompts: Path | None = None
    """File of training prompts, .jsonl or .parquet, or a data set of the Hugging Face hub, as
    hf://ORGANISATION/NAME/SPLIT. Without it the task's own generator writes one."""

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
    guess, nim, panel, debate, python, retool, search or shop; or `reasoning_gym/NAME`, which has no
    demonstrations."""

    keys: PromptKeys = PromptKeys()
    """Names of the fields in prompt files."""

    shuffle: bool = True
    """Whether each epoch visits the prompts in another order, drawn from the run's seed."""

    long_prompts: Literal["refuse", "skip"] = "refuse"
    """What is done about prompts that leave no room for an answer in the model's context: `refuse` ends the
    run before its first rollout, `skip` leaves them out, counted as quarantined prompts."""

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
        buckets = any(source.buckets for source in self.sources)
        if self.curriculum.type != "none" and len(self.sources) < 2 and not buckets:
            raise ValueError(
                f"curriculum moves shares between sources, of which there are {len(self.sources)}: give two "
                "data.sources, or one with buckets; or leave out the curriculum"
            )
        return self


class _Sampling(Config):
    """How often a group may be trained on."""

    max_reuse: int = Field(1, ge=1)
    """Steps that may train on the same group, within the staleness bound."""

    min_samples_per_insert: float = Field(1.0, gt=0)
    """Average number of steps that train on each group: admission issues no more groups than it allows.
    Below 1 more is generated than trained on; the rest goes stale and is refunded."""

    max_samples_per_insert: float | None = Field(None, gt=0)
    """Upper bound on the steps that train on a stored group, averaged over the run. A step waits rather than
    exceed it. `None` leaves the bound to `max_reuse`."""


class FifoSampler(_Sampling):
    """Takes the oldest groups first and waits for stragglers at their deadline. It uses groups again only if
    too few are fresh."""

    type: Literal["fifo"] = "fifo"
    """Name of the strategy."""


class UniformSampler(_Sampling):
    """Draws any group within the staleness bound, all with equal chance. Groups that are never drawn go stale
    and are refunded."""

    type: Literal["uniform"] = "uniform"
    """Name of the strategy."""


class _Preferring(_Sampling):
    """Base of the strategies that draw some groups more often than others."""

    importance_exponent: float = Field(0.5, ge=0, le=1)
    """Exponent of the weight that a drawn group has in the loss, which is proportional to (its chance of
    being in the step)^-exponent: 1 undoes the preference, 0 leaves it as it is."""


class FreshnessSampler(_Preferring):
    """Draws fresh groups more often: each one's chance of being in a step is proportional to
    (1 + staleness)^-exponent, and at most 1."""

    type: Literal["freshness"] = "freshness"
    """Name of the strategy."""

    exponent: float = Field(1.0, ge=0)
    """Strength of the preference; 0 is uniform."""


class PrioritySampler(_Preferring):
    """Draws fresh groups that teach more: each one's chance of being in a step is proportional to
    |advantage|^a * (1 + staleness)^-f, and at most 1."""

    type: Literal["priority"] = "priority"
    """Name of the strategy."""

    advantage_exponent: float = Field(1.0, ge=0)
    """Exponent a of a group's mean |reward - mean reward|; 0 ignores it."""

    freshness_exponent: float = Field(1.0, ge=0)
    """Exponent f of 1 / (1 + staleness); 0 ignores it."""


Sampler = FifoSampler | UniformSampler | FreshnessSampler | PrioritySampler
SamplerConfig = Annotated[Sampler, Field(discriminator="type")]


class EssBrakeConfig(Config):
    """Holds leases back while few tokens carry the updates: data then comes from newer versions."""

    below: float | None = Field(None, gt=0, lt=1)
    """Effective sample size, as a fraction of the tokens (`policy/ess_fraction`), below which a step counts
    as one that brakes. `None` never brakes."""

    steps: int = Field(3, ge=1)
    """Steps in a row below it after which leases are issued for the next step alone, as with a
    `max_staleness` of 0, and steps in a row at or above it after which all are issued again. What is rolling
    out or stored is still trained on."""


NO_ESS_BRAKE = EssBrakeConfig()


class AdmissionConfig(Config):
    """How much is rolled out, how far it may lag, and which groups a step takes."""

    groups_per_step: int = Field(32, ge=1)
    """Groups (prompts) in the batch of one optimizer step."""

    samples_per_prompt: int = Field(8, ge=1)
    """Rollouts of each prompt: the size of a group."""

    max_staleness: int = Field(4, ge=0)
    """Policy versions a trained token may lag behind the learner. 0 is on-policy."""

    exact_staleness: bool = False
    """Whether each step waits for all that is issued by then, so that a group is sampled by the version of
    its issue and, with a `fifo` sampler, trained on exactly `max_staleness` versions later. With `max_reuse`
    of r each group is trained on by the r steps of which the last comes so much later. The first steps come
    sooner after version 0. Learner and actors then take turns: it is for measurements of staleness."""

    incomplete: Literal["wait", "drop", "close_short"] = "wait"
    """What happens to an incomplete group that a step cannot go on without. `wait`: the step waits for it as
    long as it takes. `drop`: after `patience_s` it is rejected, counted, and another is issued in its place.
    `close_short`: after `patience_s` the step trains on its stored trajectories if there are at least two,
    else it is dropped. `actors.share_after_s` says when trajectories of an incomplete group are stored."""

    patience_s: float = Field(600.0, gt=0)
    """Time since a group last became complete after which a waiting step drops or closes one. Keep it longer
    than the slowest rollout that is worth its tokens."""

    max_deliver: int = Field(5, ge=3)
    """Actors that a prompt must have ended as their only suspect before it is quarantined: not rolled out
    again.

    A lease becomes a suspect when three actors disappeared with it, or two if its first delivery was handed
    back; an actor runs one suspect at a time. What an actor reports to have ended by a stop, or by another
    prompt, does not count. Neither does a lease that was handed back unread or published again."""

    sampler: SamplerConfig = FifoSampler()
    """Strategy by which a step chooses among the stored groups."""

    ess_brake: EssBrakeConfig = NO_ESS_BRAKE
    """Sets when leases are held back since the trained data is too far from the policy."""

    @model_validator(mode="after")
    def _brake_has_an_effect(self) -> Self:
        if self.ess_brake.below is not None and self.max_staleness == 0:
            raise ValueError(
                f"admission.ess_brake.below={self.ess_brake.below:g} has no effect with "
                "admission.max_staleness=0, which issues leases for the next step alone: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _staleness_can_be_exact(self) -> Self:
        sampler = self.sampler
        if not self.exact_staleness or sampler.max_reuse == 1:
            return self
        both = f"admission.exact_staleness=true and sampler.max_reuse={sampler.max_reuse}"
        if sampler.type != "fifo":
            raise ValueError(
                f"{both}: sampler.type={sampler.type!r} draws which steps train on a group, so no staleness "
                "is exact; set sampler.type=fifo, or leave out exact_staleness"
            )
        if sampler.min_samples_per_insert != sampler.max_reuse:
            raise ValueError(
                f"{both}: groups would go stale with uses left, since sampler.min_samples_per_insert="
                f"{sampler.min_samples_per_insert:g} lets more be issued; set it to {sampler.max_reuse}"
            )
        return self

    @model_validator(mode="after")
    def _ratios_can_be_kept(self) -> Self:
        least, most = self.sampler.min_samples_per_insert, self.sampler.max_samples_per_insert
        reachable = min(self.sampler.max_reuse, self.max_staleness + 1)
        if least > reachable:
            raise ValueError(
                f"sampler.min_samples_per_insert={least:g} cannot be reached: a group is trained on at most "
                f"{reachable} times, by max_reuse={self.sampler.max_reuse} and max_staleness="
                f"{self.max_staleness}; lower it or raise these"
            )
        if most is not None and most < least:
            raise ValueError(
                f"sampler.max_samples_per_insert={most:g} is below min_samples_per_insert={least:g}: raise it"
            )
        return self


def shard_numbers(text: str) -> tuple[int, ...]:
    """Return the ascending shard numbers of text such as `0,2-3`. Raises `ConfigError` for other text."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{text!r} names no shards: write 2, or 0-3, or 0,2-3")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(numbers))


class ReplayConfig(Config):
    """The trajectory store."""

    shards: int = Field(2, ge=1)
    """Number of independent stores, each with one writer; a group is in one of them."""

    here: str = "all"
    """Shards that the storage process keeps itself: all, none, or numbers as 0-1 or 0,2-3. The others are
    kept by `launch shards`, on any host."""

    linger_s: float = Field(0.02, ge=0)
    """Time that a shard gathers arriving groups before it writes them as one segment."""

    retain_bytes: int | None = Field(None, ge=0)
    """Bytes of segments that all shards keep on this disk; beyond them the oldest settled ones are removed.
    `None` keeps all.

    A group is settled when it was rejected, or trained on by a step that a durable checkpoint includes."""

    retain_age_s: float | None = Field(None, gt=0)
    """Age at which settled segments are removed. `None` keeps all. A learner that is sent back to an earlier
    checkpoint needs what it trained on since: keep segments as long as you may want to go back."""

    archive: str | None = None
    """Where segments are copied before they are removed: a directory, or any fsspec URL such as
    s3://bucket/replay (needs the extra `s3` and credentials in the AWS environment). It is tried at the
    start. `None` removes segments for good."""

    @model_validator(mode="after")
    def _those_here_exist(self) -> Self:
        if (last := max(self.numbers_here, default=0)) >= self.shards:
            raise ValueError(f"here={self.here!r}: there is no shard {last}, shards={self.shards}")
        return self

    @property
    def numbers_here(self) -> tuple[int, ...]:
        """Return the shards that the storage process keeps."""
        if self.here in ("all", "none"):
            return tuple(range(self.shards)) if self.here == "all" else ()
        return shard_numbers(self.here)


class WandbConfig(Config):
    """A run of Weights & Biases that shows the metrics."""

    project: str | None = Field(None, min_length=1)
    """Name of the project; None writes nothing there. The host of storage needs `sluice-rl[wandb]` and, for
    `online`, WANDB_API_KEY in its environment."""

    entity: str | None = None
    """User or team that the project belongs to; None is the default of the key."""

    mode: Literal["online", "offline"] = "online"
    """Whether rows are sent at once. `offline` writes them under `wandb` of the run's directory, for
    `wandb sync`."""


class MetricsConfig(Config):
    """Where metrics go besides metrics.jsonl. Storage writes them."""

    tensorboard: bool = False
    """Whether event files are written for TensorBoard; it needs `sluice-rl[tensorboard]`."""

    tensorboard_directory: Path | None = None
    """Directory of the event files; None is `tensorboard` in the run's directory."""

    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
