"""Settings of the rollout side: sampling, engines, environments and rewards. Loads without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from actors.engines.fleet.config import FleetConfig
from actors.environments.length_config import LengthProfileConfig
from bus.config import Config
from storage.weights.transport_config import RelayConfig

REST_S = 90.0
"""Longest that a SGLang server is paused, continued and ended, besides starting or loading weights."""
SglangSetting = bool | int | float | str | tuple[int | float | str, ...]


def by_name(table: Mapping[str, SglangSetting]) -> dict[str, SglangSetting]:
    """Settings that may be written as flags, by SGLang's own names, with underscores."""
    return {name.replace("-", "_"): value for name, value in table.items()}


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

    @property
    def routed_experts(self) -> bool:
        """It does not record where tokens were routed: the sglang engine does."""
        return False


class DisaggregationConfig(Config):
    """Prompts on one SGLang server and the tokens after them on another: an engine is a pair of servers."""

    enabled: bool = False
    """Whether an engine is a pair. Each of the two has all weights and devices of its own."""

    transfer: str = "mooncake"
    """By what SGLang sends keys and values from one to the other: `mooncake`, `nixl`, ... Its package has to
    be installed beside SGLang."""

    prefill: dict[str, SglangSetting] = Field(default_factory=dict)
    """Settings of the server for prompts, beside those in `server`, before which they go."""

    decode: dict[str, SglangSetting] = Field(default_factory=dict)
    """Settings of the server for the tokens after them, likewise."""

    prefill_url: str | None = None
    """Attach to this server for prompts, and for the tokens to the one at the engine's `url`."""


class SglangEngineConfig(Config):
    """An SGLang server: one that this process starts, or one that runs already."""

    type: Literal["sglang"] = "sglang"
    """Discriminates the engine union."""

    url: str | None = None
    """Attach to the SGLang server at http://host:port, instead of starting one."""

    urls: tuple[str, ...] = ()
    """Attach to several: the fleet has an engine for each. More join and leave with `launch engines`."""

    python: Path | None = None
    """Interpreter of the environment that SGLang is installed in. Without it: the one that runs this, if it
    has SGLang, else that of `make sglang`."""

    server: dict[str, SglangSetting] = Field(default_factory=dict)
    """Passed on to `sglang.launch_server`, named as its flags, such as `mem_fraction_static = 0.8`."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server."""

    disaggregation: DisaggregationConfig = DisaggregationConfig()
    """Prefill and decode on servers of their own."""

    update: Literal["disk", "tensor", "group"] = "disk"
    """How weights get there: `disk` through files in `weights_directory`, which the server must see too;
    `tensor` in the body of requests, slower, for a server on another host; `group` from the learner itself,
    over NCCL or gloo, for a server in its cluster."""

    pause: Literal["in_place", "retract", "drain"] = "in_place"
    """What an update does to generations in flight. `in_place`: they go on with what they computed before.
    `retract`: they compute it again with the new weights, which is all that a server before 0.5.19 can do.
    `drain`: the update waits for their end."""

    weights_directory: Path | None = None
    """Where the tensors of an update lie while a server reads them, the first time of the size of the model;
    without it in memory, /dev/shm."""

    start_timeout_s: float = Field(900.0, gt=0)
    """How long a server may take to start; the first start on a GPU compiles kernels."""

    request_timeout_s: float = Field(3600.0, gt=0)
    """How long one generation may take; after it, it is aborted and counts as failed. The fleet's limit of
    this name, unless it is longer, interrupts it before."""

    update_timeout_s: float = Field(600.0, gt=0)
    """How long an update may take, with `drain` from the moment on when no request is let through. With
    `update = "group"` getting the weights ready, while the server generates, may take as long before."""

    stream_interval: int = Field(128, ge=0)
    """Tokens after which a server hands out what it has drawn of a generation: one that dies costs so many of
    each at most. 0 has it hand them out at the end only."""

    routed_experts: bool = False
    """Record to which experts a mixture of experts sent each token, in every layer: trajectories carry it."""

    health_every_s: float = Field(10.0, gt=0)
    """Between two looks at whether the server still generates."""

    health_timeout_s: float = Field(30.0, gt=0)
    """A server that twice does not answer in this time is taken for dead: the fleet builds another engine."""

    @property
    def settings(self) -> dict[str, SglangSetting]:
        """`server` by SGLang's own names, with underscores."""
        return by_name(self.server)

    @property
    def in_files(self) -> bool:
        """Whether weights that this host has get to the server in files."""
        return self.update == "disk" or (self.update == "group" and not self.attached)

    @model_validator(mode="after")
    def _attached_servers_are_not_ours(self) -> Self:
        for url in self.attached:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"url={url!r} is no URL: write it as http://host:port")
            if self.server or self.environment or self.python:
                raise ValueError(
                    f"url={url!r} attaches to a server that runs: leave out server, environment and python"
                )
        if self.url is not None and self.urls:
            raise ValueError(f"url={self.url!r} beside urls: put it among them")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls={list(self.urls)} names a server twice: each would load weights twice")
        return self

    @model_validator(mode="after")
    def _a_pair_is_one_engine(self) -> Self:
        pair = self.disaggregation
        if not pair.enabled:
            if pair != DisaggregationConfig():
                raise ValueError("disaggregation has settings and is off: set disaggregation.enabled=true")
            return self
        if self.update == "group":
            raise ValueError(
                'disaggregation with update="group": the learner sends to one server, and a pair is two: '
                "set update=disk or update=tensor"
            )
        if self.pause == "retract":
            raise ValueError(
                "disaggregation with pause=retract: SGLang does not say which tokens of what it puts aside "
                "are of which weights: set pause=in_place or pause=drain"
            )
        if self.routed_experts:
            raise ValueError(
                "disaggregation with routed_experts: each server of a pair knows those of its own tokens "
                "only: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _an_attached_pair_has_two_urls(self) -> Self:
        pair = self.disaggregation
        if self.urls and pair.enabled:
            raise ValueError(
                f"disaggregation with urls={list(self.urls)}: one pair is named by url (decode) and "
                "disaggregation.prefill_url; more need actors of their own"
            )
        if pair.enabled and (self.url is None) != (pair.prefill_url is None):
            raise ValueError(
                f"url={self.url!r} with disaggregation.prefill_url={pair.prefill_url!r}: a pair that runs "
                "already has both"
            )
        if pair.prefill_url is not None:
            if not pair.prefill_url.startswith(("http://", "https://")):
                raise ValueError(
                    f"disaggregation.prefill_url={pair.prefill_url!r} is no URL: write it as http://host:port"
                )
            if pair.prefill or pair.decode:
                raise ValueError(
                    f"disaggregation.prefill_url={pair.prefill_url!r} attaches to a server that runs: leave "
                    "out disaggregation.prefill and disaggregation.decode"
                )
        return self

    @property
    def attached(self) -> tuple[str, ...]:
        """Servers that run already; empty where this process starts its own."""
        return self.urls or (() if self.url is None else (self.url,))

    def attached_to(self, url: str) -> "SglangEngineConfig":
        """The settings of an engine at one of them, or at another that somebody names."""
        own = url in self.attached
        return self.model_copy(
            update={
                "url": url.rstrip("/"),
                "urls": (),
                "server": {},
                "environment": {},
                "python": None,
                "disaggregation": self.disaggregation if own else DisaggregationConfig(),
            }
        )


EngineConfig = Annotated[EmbeddedEngineConfig | SglangEngineConfig, Field(discriminator="type")]


class SingleTurnConfig(Config):
    """One prompt, one completion, one reward."""

    type: Literal["single_turn"] = "single_turn"
    """Discriminates the environment union."""

    reward: str = "exact"
    """A built-in reward's name, or a function of your own as `my_pkg.my_module:function`."""

    reward_timeout_s: float = Field(30.0, gt=0)
    """Longest that one call of the reward may take; after it the rollout counts as failed."""


EnvironmentConfig = Annotated[SingleTurnConfig | LengthProfileConfig, Field(discriminator="type")]


class EvaluatorConfig(Config):
    """How an actor answers held-out prompts."""

    engine: Literal["own", "rollout"] | None = None
    """`own`: an embedded engine beside the others, which keeps exactly the version asked for. `rollout`: the
    engines that roll out, in turn with rollouts, from when they have that version; later ones may draw some
    of the tokens, and the result says which. Without it: `own` where the rollouts' engine is embedded, and
    `rollout` with `sglang`."""

    prompts_at_once: int = Field(64, ge=1)
    """Prompts under way at a time on the engines that roll out: rollouts wait for no more than these."""


class ActorsConfig(Config):
    """One actor process: its engine, what it does with a prompt, how much at once."""

    engine: EngineConfig = EmbeddedEngineConfig()
    """What generates."""

    fleet: FleetConfig = FleetConfig()
    """How many such engines, how requests find one, and what becomes of one that fails."""

    environment: EnvironmentConfig = SingleTurnConfig()
    """What a rollout is, and how it is rewarded."""

    evaluation: EvaluatorConfig = EvaluatorConfig()
    """How it answers held-out prompts."""

    weights: RelayConfig = RelayConfig()
    """How published weights get here, and on from here; counts where the learner publishes over HTTP."""

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

    @property
    def evaluates_on(self) -> Literal["own", "rollout"]:
        """The engine of held-out prompts, also where the settings leave it to that of the rollouts."""
        default: Literal["own", "rollout"] = "rollout" if self.engine.type == "sglang" else "own"
        return self.evaluation.engine or default

    @model_validator(mode="after")
    def _a_url_is_one_engine(self) -> Self:
        urls = self.engine.attached if isinstance(self.engine, SglangEngineConfig) else ()
        if urls and self.fleet.engines not in (1, len(urls)):
            raise ValueError(
                f"engine.urls names {len(urls)} servers, fleet.engines={self.fleet.engines}: leave that out, "
                "each URL is an engine"
            )
        return self

    @model_validator(mode="after")
    def _an_engine_speaks_before_the_fleet_gives_it_up(self) -> Self:
        """An engine that ran out of time says of what; the fleet can only say that it took too long."""
        if isinstance(self.engine, SglangEngineConfig):
            for limit in ("start_timeout_s", "update_timeout_s"):
                own, fleets = getattr(self.engine, limit), getattr(self.fleet, limit)
                twice = limit == "update_timeout_s" and self.engine.update == "group"
                needed = (2 if twice else 1) * own + REST_S
                times = ", once to get weights ready and once to take them," if twice else ""
                if needed > fleets:
                    raise ValueError(
                        f"engine.{limit}={own:g}{times} and {REST_S:g} s to pause and end a "
                        f"server are more than fleet.{limit}={fleets:g}: "
                        f"lower the engine's, or raise the fleet's to {needed:g}"
                    )
        return self
