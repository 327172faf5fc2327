"""Configuration of what outlives the processes: prompts, admission, replay, evaluation."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config
from bus.errors import ConfigError


class PromptKeys(Config):
    """Which fields of a prompt file mean what."""

    prompt: str = "prompt"
    """Plain text, or chat messages [{"role": ..., "content": ...}, ...]."""

    label: str = "label"
    """What the reward compares with; may be absent."""

    metadata: str = "metadata"
    """An object handed to the reward and the environment; may be absent."""


class DataConfig(Config):
    """The prompts to train on and the held-out prompts to measure with."""

    prompts: Path | None = None
    """Training prompts, .jsonl or .parquet. Without it the task's own generator writes one."""

    heldout: Path | None = None
    """Held-out prompts, same format. Without it none are evaluated, or the generator's are."""

    task: str | None = None
    """Built-in task that generates prompts, held-out prompts and demonstrations: sort, addition."""

    keys: PromptKeys = PromptKeys()
    """Names of the fields in prompt files."""

    shuffle: bool = True
    """Visit the prompts of each epoch in another order, drawn from the run's seed."""


class _Sampling(Config):
    """How often a group may be trained on."""

    max_reuse: int = Field(1, ge=1)
    """Steps that may train on the same group, within the staleness bound."""

    min_samples_per_insert: float = Field(1.0, gt=0)
    """Steps that each group is to be trained in on average: admission issues no more than that allows.
    Below 1 more is generated than trained; the rest goes stale and is refunded."""

    max_samples_per_insert: float | None = Field(None, gt=0)
    """A step waits rather than exceed so many samples a stored group on average over the run.
    `None` leaves it to `max_reuse`."""


class FifoSampler(_Sampling):
    """The oldest groups first, stragglers awaited at their deadline; groups are used again only if too few
    are fresh."""

    type: Literal["fifo"] = "fifo"
    """Name of the strategy."""


class UniformSampler(_Sampling):
    """Any group within the staleness bound, all alike. Those never drawn go stale and are refunded."""

    type: Literal["uniform"] = "uniform"
    """Name of the strategy."""


class _Preferring(_Sampling):
    """A strategy that draws some groups more often than others."""

    importance_exponent: float = Field(0.5, ge=0, le=1)
    """Weighs each drawn group's loss by (its chance * groups)^-exponent; 1 undoes the preference."""


class FreshnessSampler(_Preferring):
    """Fresh groups more often: in proportion to (1 + staleness)^-exponent."""

    type: Literal["freshness"] = "freshness"
    """Name of the strategy."""

    exponent: float = Field(1.0, ge=0)
    """0 is uniform."""


class PrioritySampler(_Preferring):
    """Groups that teach more, and fresh ones, more often: |advantage|^a * (1 + staleness)^-f."""

    type: Literal["priority"] = "priority"
    """Name of the strategy."""

    advantage_exponent: float = Field(1.0, ge=0)
    """Of the mean |reward - mean reward| among siblings; 0 ignores it."""

    freshness_exponent: float = Field(1.0, ge=0)
    """Of 1 / (1 + staleness); 0 ignores it."""


Sampler = FifoSampler | UniformSampler | FreshnessSampler | PrioritySampler
SamplerConfig = Annotated[Sampler, Field(discriminator="type")]


class AdmissionConfig(Config):
    """How much is rolled out, how far it may lag, and which groups a step takes."""

    groups_per_step: int = Field(32, ge=1)
    """Groups (prompts) in the batch of one optimizer step."""

    samples_per_prompt: int = Field(8, ge=1)
    """Rollouts of each prompt: the size of a group."""

    max_staleness: int = Field(4, ge=0)
    """Policy versions a trained token may lag behind the learner. 0 is on-policy."""

    incomplete: Literal["wait", "drop", "close_short"] = "wait"
    """What becomes of a group that a step cannot go on without: `wait` for it as long as it takes; or, when
    patience ends, `drop` it: rejected as incomplete, counted, and another is issued in its place; or
    `close_short`: train on the siblings that are stored, if there are two at least, else drop it. Siblings
    are stored before their group is whole as `actors.share_after_s` says."""

    patience_s: float = Field(600.0, gt=0)
    """How long a step waits, since a group last became complete, before one is dropped or closed. Keep it
    longer than the slowest rollout that is worth its tokens."""

    max_deliver: int = Field(5, ge=3)
    """Deliveries of a prompt to actors that die of it, before it is quarantined: never rolled out again.

    The first two prove nothing: the actor may have died of another prompt, or have been stopped. From the
    third on an actor rolls such prompts out one at a time and has each attempt counted as it begins; only
    those count, `max_deliver` - 2 of them. A lease that was handed back unread, or published again after
    the bus lost it, was no attempt."""

    sampler: SamplerConfig = FifoSampler()
    """Which of the stored groups a step trains on, and how often."""

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
    """Ascending, from text such as `2`, `0-3` or `0,2-3`. Raises `ConfigError` for any other."""
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
    """Independent stores, each with one writer; a group lives in one of them."""

    here: str = "all"
    """Shards that the storage process keeps itself: all, none, or numbers as 0-1 or 0,2-3. The others are
    kept by `launch shards`, on any host."""

    linger_s: float = Field(0.02, ge=0)
    """How long a shard gathers arriving groups before it writes them as one segment."""

    retain_bytes: int | None = Field(None, ge=0)
    """Segments kept on this disk, all shards together; beyond, the oldest settled ones go. None keeps all.

    Settled are groups that were rejected, or trained on by a step that a durable checkpoint holds."""

    retain_age_s: float | None = Field(None, gt=0)
    """Settled segments older than this go. None keeps all. A learner that is sent back to a checkpoint before
    its latest needs what it trained on since: keep as long as you may want to go back."""

    archive: str | None = None
    """Where segments go before they are removed: a directory, or any fsspec URL such as s3://bucket/replay
    (needs the extra `s3` and credentials in the AWS environment). It is tried at the start. None removes
    them for good."""

    @model_validator(mode="after")
    def _those_here_exist(self) -> Self:
        if (last := max(self.numbers_here, default=0)) >= self.shards:
            raise ValueError(f"here={self.here!r}: there is no shard {last}, shards={self.shards}")
        return self

    @property
    def numbers_here(self) -> tuple[int, ...]:
        """The shards that the storage process keeps."""
        if self.here in ("all", "none"):
            return tuple(range(self.shards)) if self.here == "all" else ()
        return shard_numbers(self.here)


class EvaluationConfig(Config):
    """Held-out accuracy, measured by the actors as `actors.evaluation` says."""

    every_versions: int = Field(10, ge=0)
    """Evaluate each so many versions; 0 measures only the first and the last."""

    patience_s: float = Field(300.0, gt=0)
    """How long the learner waits for the accuracy of the version it is at, before it goes on without: at the
    end, where `learner.target_accuracy` seems reached and, with evaluations on the engines that roll out,
    before the first step of reinforcement learning."""
