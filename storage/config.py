"""Configuration of what outlives the processes: prompts, admission, replay, evaluation."""

from pathlib import Path
from pydantic import Field

from bus.config import Config


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


class AdmissionConfig(Config):
    """How much is rolled out, and how far it may lag."""

    groups_per_step: int = Field(32, ge=1)
    """Groups (prompts) in the batch of one optimizer step."""

    samples_per_prompt: int = Field(8, ge=1)
    """Rollouts of each prompt: the size of a group."""

    max_staleness: int = Field(4, ge=0)
    """Policy versions a trained token may lag behind the learner. 0 is on-policy."""


class ReplayConfig(Config):
    """The trajectory store."""

    shards: int = Field(2, ge=1)
    """Independent stores, each with one writer; a group lives in one of them."""

    linger_s: float = Field(0.02, ge=0)
    """How long a shard gathers arriving groups before it writes them as one segment."""


class EvaluationConfig(Config):
    """Held-out accuracy, measured by the actors on exactly one policy version."""

    every_versions: int = Field(10, ge=0)
    """Evaluate each so many versions; 0 measures only the first and the last."""
