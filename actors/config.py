"""Settings of the rollout side: sampling, engines, environments and rewards. Loads without torch."""

from typing import Literal

from pydantic import Field

from actors.engines.fleet_config import FleetConfig
from bus.config import Config


class SamplingConfig(Config):
    """How tokens are drawn while rolling out."""

    temperature: float = Field(1.0, gt=0)
    """Divides the logits before the softmax; the learner's log-probs use the same value."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus: keep the likeliest tokens whose mass reaches this; 1 keeps all, as the learner assumes."""

    top_k: int = Field(0, ge=0)
    """Keep only this many of the likeliest tokens; 0 keeps all, as the learner assumes."""

    max_new_tokens: int = Field(512, ge=1)
    """Longest completion, in tokens; a longer one ends with finish reason `length`."""


class EmbeddedEngineConfig(Config):
    """Transformers in this process: for laptops, tests and small models."""

    type: Literal["embedded"] = "embedded"
    """Discriminates the engine union."""

    slots: int = Field(256, ge=1)
    """Generations decoded at once; further ones wait."""

    threads: int = Field(1, ge=1)
    """CPU threads of one decode step; torch has one such number per process, the engine sets it."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Weights, activations and KV cache; log-probs are always float32."""

    attention: Literal["sdpa", "eager"] = "sdpa"
    """The transformers attention implementation."""

    prefill_tokens: int = Field(4096, ge=1)
    """Prompt tokens, padding included, computed between two decode steps; a longer prompt goes alone."""

    seed: int | None = None
    """Seeds the sampler for tests; without it every engine draws differently."""

    close_timeout_s: float = Field(30.0, gt=0)
    """How long closing waits for the decode step under way."""


class SingleTurnConfig(Config):
    """One prompt, one completion, one reward."""

    type: Literal["single_turn"] = "single_turn"
    """Discriminates the environment union."""

    reward: str = "exact"
    """A built-in reward's name, or a function of your own as `my_pkg.my_module:function`."""

    reward_timeout_s: float = Field(30.0, gt=0)
    """Longest that one call of the reward may take; after it the rollout counts as failed."""


class ActorsConfig(Config):
    """One actor process: its engine, what it does with a prompt, how much at once."""

    engine: EmbeddedEngineConfig = EmbeddedEngineConfig()
    """What generates."""

    fleet: FleetConfig = FleetConfig()
    """How many such engines, how requests find one, and what becomes of one that fails."""

    environment: SingleTurnConfig = SingleTurnConfig()
    """What a rollout is, and how it is rewarded."""

    group_filter: str = "none"
    """Which groups are worth training on: none, zero_variance, or `my_pkg.my_module:function`."""

    groups_at_once: int = Field(64, ge=1)
    """Prompt leases this process rolls out at the same time."""

    share_after_s: float | None = Field(5.0, ge=0)
    """Rollouts that are finished for so long are handed to storage though their siblings still run, so that
    an actor's death costs only what was unfinished. `None` hands over whole groups only."""

    mask_older_versions: int | None = Field(None, ge=0)
    """Policy versions that a token may lag the newest token of its trajectory and still be trained on; older
    ones are masked, and recorded as such. `None` trains on all: the correction weighs them."""

    patience_s: float = Field(600.0, gt=0)
    """How long start-up waits for the learner's first policy version."""
