"""Settings of the rollout side: sampling, engines, environments and rewards. Loads without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from actors.engines.fleet.config import FleetConfig
from actors.environments.agent_config import AgentConfig
from actors.environments.clients_config import ClientsConfig
from actors.environments.debate_config import DebateConfig
from actors.environments.games.config import GameConfig
from actors.environments.length_config import LengthProfileConfig
from actors.environments.panel_config import PanelConfig
from actors.environments.tools_config import ToolsConfig
from actors.evaluation.config import EvaluationEngine, EvaluatorConfig
from actors.group_config import GroupLimitsConfig, RetriesConfig
from actors.opponents.config import OpponentConfig, refuse_misnamed
from actors.rewards.config import RewardConfig
from bus.config import MOST_KEPT, Config
from storage.weights.transport_config import RelayConfig

REST_S = 90.0
"""Longest time to pause, continue and end a SGLang server, besides starting it or loading weights."""
SglangSetting = bool | int | float | str | tuple[int | float | str, ...]


def by_name(table: Mapping[str, SglangSetting]) -> dict[str, SglangSetting]:
    """Return settings that may be written as flags by SGLang's own names, with underscores."""
    return {name.replace("-", "_"): value for name, value in table.items()}


class SamplingConfig(Config):
    """How rollouts sample tokens."""

    temperature: float = Field(1.0, gt=0)
    """Divisor of the logits before the softmax; the learner's log-probs use the same value."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass of the likeliest tokens that are kept; 1 keeps all, as the learner assumes."""

    top_k: int = Field(0, ge=0)
    """Number of the likeliest tokens that are kept; 0 keeps all, as the learner assumes."""

    min_p: float = Field(0.0, ge=0, lt=1)
    """Least probability of the tokens that are kept, as a fraction of the likeliest one's; 0 keeps all."""

    keep_masks: bool = False
    """Record which tokens were kept where some are cut off, so that the learner computes log-probs over the
    same ones. Only the embedded engine can; at most 1024 are kept then."""

    max_new_tokens: int = Field(512, ge=1)
    """Upper bound on a completion in tokens; one that reaches it ends with finish reason `length`."""

    @property
    def cuts_off(self) -> bool:
        """Tell whether tokens are drawn from some of the vocabulary alone."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @model_validator(mode="after")
    def _kept_sets_are_bounded(self) -> Self:
        if self.keep_masks and (self.top_k > MOST_KEPT or not self.cuts_off):
            raise ValueError(
                f"sampling.keep_masks=true records what top_p, top_k or min_p keep, at most {MOST_KEPT}: "
                f"set one of them (top_k={self.top_k}), or leave keep_masks out"
            )
        return self


class EmbeddedEngineConfig(Config):
    """Engine of transformers in the actor's process, for laptops, tests and small models."""

    type: Literal["embedded"] = "embedded"
    """Name of the engine."""

    slots: int = Field(256, ge=1)
    """Most generations that are decoded at once; further ones wait."""

    threads: int = Field(1, ge=1)
    """CPU threads of a decode step. Torch has one such number for each process, and the engine sets it."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights, activations and KV cache; log-probs are always float32."""

    attention: Literal["sdpa", "eager"] = "sdpa"
    """Implementation of attention in transformers."""

    prefill_tokens: int = Field(4096, ge=1)
    """Most prompt tokens, with padding, computed between two decode steps; a longer prompt goes alone."""

    seed: int | None = None
    """Seed of the sampler, for tests; without it every engine draws differently."""

    close_timeout_s: float = Field(30.0, gt=0)
    """Longest time that closing waits for the present decode step."""

    kv_tokens: int | None = Field(None, ge=1)
    """Tokens of contexts that the engine is to hold at once, by which leases are taken
    (`fleet.soft_kv_share`). `None` bounds them by their number alone."""

    @property
    def routed_experts(self) -> bool:
        """Return whether it records where tokens were routed: never, unlike the sglang engine."""
        return False

    @property
    def context(self) -> int | None:
        """Return None: its context is always the model's, unlike that of the sglang engine."""
        return None

    @property
    def left_free(self) -> int:
        """Return the tokens of a context that no trajectory takes up, unlike at the sglang engine: none."""
        return 0


class DisaggregationConfig(Config):
    """An engine as a pair of SGLang servers: one computes prompts, the other the tokens after them."""

    enabled: bool = False
    """Whether an engine is a pair of servers. Each has all weights, on devices of its own."""

    transfer: str = "mooncake"
    """Library by which SGLang sends keys and values between the two: `mooncake`, `nixl`, ... Its package has
    to be installed beside SGLang."""

    prefill: dict[str, SglangSetting] = Field(default_factory=dict)
    """Settings of the server for prompts, in addition to those in `server`, which they override."""

    decode: dict[str, SglangSetting] = Field(default_factory=dict)
    """Settings of the server for the tokens after prompts, in addition to `server`, which they override."""

    prefill_url: str | None = None
    """Running server for prompts to attach to; the engine's `url` is the one for the tokens after them."""


class SglangEngineConfig(Config):
    """Engine of an SGLang server: one that the actor starts, or one that runs already."""

    type: Literal["sglang"] = "sglang"
    """Name of the engine."""

    url: str | None = None
    """Running SGLang server to attach to, as http://host:port; without it the actor starts one."""

    urls: tuple[str, ...] = ()
    """Several running servers to attach to; the fleet has an engine for each. More join and leave with
    `launch engines`."""

    python: Path | None = None
    """Interpreter of the environment that SGLang is installed in. Without it the actor's own is
    used if it has SGLang, else that of `make sglang`."""

    server: dict[str, SglangSetting] = Field(default_factory=dict)
    """Settings for `sglang.launch_server`, named as its flags, such as `mem_fraction_static = 0.8`."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server."""

    disaggregation: DisaggregationConfig = DisaggregationConfig()
    """Whether prompts are computed by a server of their own."""

    update: Literal["disk", "tensor", "group"] = "disk"
    """How weights get to the server. `disk`: in files in `weights_directory`, which the server must see too.
    `tensor`: in the body of requests, which is slower, for a server on another host. `group`: from the
    learner itself, over NCCL or gloo, for a server in its cluster."""

    pause: Literal["in_place", "retract", "drain"] = "in_place"
    """What an update does to running generations. `in_place`: they go on with what they computed before.
    `retract`: they compute it again with the new weights, which is all that a server before 0.5.19 can do.
    `drain`: the update waits for their end."""

    weights_directory: Path | None = None
    """Directory of the tensors of an update while a server reads them; the first update has the size of the
    model. Without it they are in memory, in /dev/shm."""

    start_timeout_s: float = Field(900.0, gt=0)
    """Longest time that a server may take to start; the first start on a GPU compiles kernels."""

    request_timeout_s: float = Field(3600.0, gt=0)
    """Longest time that one generation may take before it is aborted and counts as failed. The fleet's limit
    of this name interrupts it before, unless that is longer."""

    update_timeout_s: float = Field(600.0, gt=0)
    """Longest time that an update may take; with `drain` it starts when no new request is let through. With
    `update = "group"` the preparation, during which the server generates, may take as long before."""

    stream_interval: int = Field(128, ge=0)
    """Tokens after which a server hands out the part of a generation that it has sampled: a server that dies
    loses at most so many of each. With 0 it hands them out at the end only."""

    routed_experts: bool = False
    """Whether trajectories record to which experts a mixture of experts sent each token, in every layer."""

    health_every_s: float = Field(10.0, gt=0)
    """Time from one check that the server still generates to the next."""

    health_timeout_s: float = Field(30.0, gt=0)
    """Longest answer time of a check. A server that exceeds it twice counts as dead, and the fleet builds
    another engine."""

    @property
    def settings(self) -> dict[str, SglangSetting]:
        """Return the settings in `server` by SGLang's own names, with underscores."""
        return by_name(self.server)

    @property
    def in_files(self) -> bool:
        """Return whether weights that this host has are written to files for the server."""
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
        """URLs of the running servers; empty where the actor starts its own."""
        return self.urls or (() if self.url is None else (self.url,))

    @property
    def claimed(self) -> tuple[str, ...]:
        """URLs of all running servers that nobody else may use, that for a pair's prompts among them."""
        prefill = self.disaggregation.prefill_url
        return tuple(url.rstrip("/") for url in (*self.attached, *([prefill] if prefill else [])))

    def attached_to(self, url: str) -> "SglangEngineConfig":
        """Return the settings of an engine at one of these URLs, or at another that joins."""
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

    @property
    def context(self) -> int | None:
        """Return the context of its servers in tokens, where that is set; else it is the model's."""
        context = by_name(self.server).get("context_length")
        return context if isinstance(context, int) else None

    @property
    def left_free(self) -> int:
        """Return the tokens of a context that no trajectory takes up: SGLang ends a generation before."""
        return 2


EngineConfig = Annotated[EmbeddedEngineConfig | SglangEngineConfig, Field(discriminator="type")]


class SingleTurnConfig(RewardConfig):
    """Environment in which an episode is one prompt, one completion and one reward."""

    type: Literal["single_turn"] = "single_turn"
    """Name of the environment."""


class PluginEnvironmentConfig(Config):
    """Environment of the user's own."""

    type: Literal["plugin"]
    """Name of the environment."""

    environment: str
    """Class of the environment, as `my_pkg.my_module:Class`."""

    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the environment, which its nested class `Settings` declares."""


EnvironmentConfig = Annotated[
    SingleTurnConfig
    | ToolsConfig
    | AgentConfig
    | GameConfig
    | PanelConfig
    | DebateConfig
    | ClientsConfig
    | LengthProfileConfig
    | PluginEnvironmentConfig,
    Field(discriminator="type"),
]


class NamedEnvironmentConfig(Config):
    """One more environment of a run, which prompts choose by its name."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")
    """Name by which it is chosen: letters, digits, - and _."""

    environment: EnvironmentConfig
    """Environment, with its reward."""


class ActorsConfig(Config):
    """One actor process: its engines, its environment, and how many prompts it rolls out at once."""

    engine: EngineConfig = EmbeddedEngineConfig()
    """Engine that generates tokens."""

    fleet: FleetConfig = FleetConfig()
    """How many such engines there are, how requests are spread, and what happens to one that fails."""

    environment: EnvironmentConfig = SingleTurnConfig()
    """Environment of a rollout, with its reward."""

    environments: tuple[NamedEnvironmentConfig, ...] = ()
    """Further environments. A source of prompts, an evaluation set or a prompt's metadata choose one of them
    by its name instead of `environment`."""

    opponents: dict[str, OpponentConfig] = Field(default_factory=dict)
    """Frozen policies that environments may ask beside the policy, by name."""

    evaluation: EvaluatorConfig = EvaluatorConfig()
    """How the actor answers held-out prompts."""

    weights: RelayConfig = RelayConfig()
    """How the actor fetches weights and relays them; it applies where the learner publishes over HTTP."""

    group_filter: str = "none"
    """Filter of groups that are worth training on: none, zero_variance, or `my_pkg.my_module:function`."""

    group_limits: GroupLimitsConfig = GroupLimitsConfig()
    """Bounds on rewards and lengths of groups that are trained on, which apply before the filter."""

    retries: RetriesConfig = RetriesConfig()
    """How often a rollout that something around the policy failed is repeated."""

    groups_at_once: int = Field(64, ge=1)
    """Most prompt leases that this process rolls out at the same time."""

    share_after_s: float | None = Field(5.0, ge=0)
    """Time after its end at which a rollout is stored though others of its group still run, so that an
    actor's death costs only unfinished ones. `None` hands over complete groups only."""

    tool_calls: Literal["auto", "hermes", "qwen3_coder", "llama3", "mistral"] = "auto"
    """How the model writes tool calls; `auto` tells it from the chat template."""

    mask_older_versions: int | None = Field(None, ge=0)
    """Policy versions that a token may lag the newest token of its trajectory and still be trained on. Older
    tokens are masked, and recorded as such. `None` trains on all; the correction weighs them."""

    probe_bound_nats: float = Field(0.1, gt=0)
    """Mean difference a token between an engine and the learner, on the probe of a version that both have,
    above which the actor gives an alarm. In bfloat16 it is a few hundredths, in float32 below 1e-4."""

    patience_s: float = Field(600.0, gt=0)
    """Longest time that a starting actor waits for the learner's first policy version."""

    @property
    def evaluates_on(self) -> EvaluationEngine:
        """Engine of held-out prompts, also where the settings derive it from that of the rollouts."""
        if self.evaluation.only or self.evaluation.has_own_servers:
            return "own"
        default: EvaluationEngine = "rollout" if self.engine.type == "sglang" else "own"
        return self.evaluation.engine or default

    @property
    def by_name(self) -> Mapping[str, EnvironmentConfig]:
        """Return all environments by name, first that of prompts that choose none, whose name is empty."""
        return {"": self.environment, **{one.name: one.environment for one in self.environments}}

    @model_validator(mode="after")
    def _opponents_have_names_of_their_own(self) -> Self:
        refuse_misnamed(self.opponents, ())
        return self

    @model_validator(mode="after")
    def _environments_go_together(self) -> Self:
        """Refuse names used twice, and clients from outside: they take only the leases that they ask for."""
        names = [one.name for one in self.environments]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two environments are named {twice[0]!r}: give each a name of its own")
        if self.environments and any(isinstance(one, ClientsConfig) for one in self.by_name.values()):
            raise ValueError(
                "environments with type=clients: leases are taken when clients ask for them, which those of "
                "another environment would wait for: leave out environments, or that type"
            )
        return self

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
        """Refuse limits of the fleet below those of the engine, whose error says what took too long."""
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

    @model_validator(mode="after")
    def _evaluations_have_their_own_servers(self) -> Self:
        rolling = self.engine.attached if isinstance(self.engine, SglangEngineConfig) else ()
        both = {url.rstrip("/") for url in rolling} & {url.rstrip("/") for url in self.evaluation.urls}
        if both:
            raise ValueError(
                f"evaluation.urls names {min(both)}, which rolls out with other weights (engine.urls): name "
                'another server, or set evaluation.engine="rollout" and leave out evaluation.urls'
            )
        if self.evaluation.only and isinstance(self.environment, ClientsConfig):
            raise ValueError(
                "evaluation.only=true with environment.type=clients: no held-out prompts are offered to "
                "clients: leave out one of them"
            )
        return self
