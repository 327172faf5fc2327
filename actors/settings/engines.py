"""Settings of engines: of one in the actor's process, and of SGLang servers. Loads without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config, HttpUrl
from bus.errors import ConfigError
from storage.model_files.families import families_with, family_named

SglangSetting = bool | int | float | str | tuple[int | float | str, ...]
MASK_TOKENS = "sampling_mask_max_tokens"
"""SGLang's setting of the largest set of kept tokens that it tells, which it has where it tells any."""


def by_name(table: Mapping[str, SglangSetting]) -> dict[str, SglangSetting]:
    """Return settings that may be written as flags by SGLang's own names, with underscores."""
    return {name.replace("-", "_"): value for name, value in table.items()}


def tells_kept(speculation: str) -> bool:
    """Return whether SGLang tells which tokens sampling kept with an algorithm of speculative decoding."""
    return not speculation or speculation.upper().startswith("DFLASH")


class EngineSettings(Config):
    """Settings of an engine, whose class is its record; the defaults hold for one in the actor's process."""

    type: str
    routed_experts: bool = False
    """Whether trajectories record to which experts a mixture of experts sent each token, in every layer."""
    built_by: ClassVar[str]
    """What builds an engine from these settings, the model's directory and an `EnginePlace`, as
    `module:function`. The name is text, because settings load quickly."""
    in_process: ClassVar[bool] = True
    """The engine computes in the actor's process; else it is one or several servers of SGLang."""
    left_free: ClassVar[int] = 0
    """Tokens of a context that no trajectory takes up."""

    @property
    def servers(self) -> "SglangEngineConfig":
        """Return the settings of SGLang's servers that join it or evaluate beside it; its own, if it is
        some."""
        return SglangEngineConfig(routed_experts=self.routed_experts)

    @property
    def embedded(self) -> "EmbeddedEngineConfig":
        """Return the settings of an engine of transformers beside it; its own, if it is one."""
        return EmbeddedEngineConfig()

    @property
    def inexact(self) -> str:
        """Return why the engine cannot compute in exact arithmetic (model.numerics); empty if it can."""
        return (
            f"actors.engine.type={self.type}: it adds up in another way; set it to embedded (or "
            "model.numerics to sglang, with which the learner computes by SGLang's kernels)"
        )

    @property
    def starts_servers(self) -> bool:
        return not (self.in_process or self.attached)

    @property
    def attached(self) -> tuple[str, ...]:
        """URLs of the running servers; empty where the actor starts its engine."""
        return ()

    @property
    def claimed(self) -> tuple[str, ...]:
        """URLs of all running servers that nobody else may use."""
        return self.attached

    @property
    def adds_adapters(self) -> bool:
        """Tell whether the engine adds adapters to weights itself, so that it may serve several policies."""
        return False

    @property
    def context(self) -> int | None:
        """Return the engine's context in tokens, where that is set; else it is the model's."""
        return None


class EmbeddedEngineConfig(EngineSettings):
    """Engine of transformers in the actor's process, for laptops, tests and small models."""

    type: Literal["embedded"] = "embedded"
    built_by: ClassVar[str] = "actors.engines.fleet.build:embedded_engine"
    slots: int = Field(256, ge=1)
    """Most generations that are decoded at once; further ones wait."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of a decode step. Torch has one such number for each process, and the engine sets it.
    `None` is all cores that the process may use, for a model of at least 20 MB, and else one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights, activations and KV cache; log-probs are always float32."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Implementation of attention in transformers; models without `sdpa`, such as gpt-oss, have `eager`."""
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
    def embedded(self) -> "EmbeddedEngineConfig":
        return self

    @property
    def inexact(self) -> str:
        if self.dtype != "float32":
            return f"actors.engine.dtype={self.dtype}: set it to float32"
        if self.attention != "sdpa":
            return (
                f"actors.engine.attention={self.attention}: exact attention is one of its own; leave it out"
            )
        return ""


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
    prefill_url: HttpUrl | None = None
    """Running server for prompts to attach to; the engine's `url` is the one for the tokens after them."""


class SglangEngineConfig(EngineSettings):
    """Engine of an SGLang server: one that the actor starts, or one that runs already."""

    type: Literal["sglang"] = "sglang"
    built_by: ClassVar[str] = "actors.engines.fleet.build:sglang_engine"
    in_process: ClassVar[bool] = False
    left_free: ClassVar[int] = 2  # SGLang ends a generation before
    url: HttpUrl | None = None
    """Running SGLang server to attach to, as http://host:port; without it the actor starts one."""
    urls: tuple[HttpUrl, ...] = ()
    """Several running servers to attach to; the fleet has an engine for each. More join and leave with
    `launch engines`."""
    python: Path | None = None
    """Interpreter of the environment that SGLang is installed in. Without it the actor's own is
    used if it has SGLang, else that of `make sglang`."""
    server: dict[str, SglangSetting] = Field(default_factory=dict)
    """Settings for `sglang.launch_server`, named as its flags, such as `mem_fraction_static = 0.8`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server."""
    kernel_cache: Path = Path("~/.cache/sglang")
    """Directory where servers keep compiled kernels from one start to the next."""
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    """Whether prompts are computed by a server of their own."""
    nodes: int = Field(1, ge=1)
    """Number of hosts of one engine. `launch actors` runs on each of them, with its own `node_rank`."""
    node_rank: int = Field(0, ge=0)
    """Number of this host among those of its engine. Node 0 takes leases and weights for all of them."""
    rendezvous: str = ""
    """Address of node 0, as host:port, where the ranks of an engine of several nodes find each other. Jobs
    of `launch slurm` and pods of the Helm chart have their own."""
    update: Literal["disk", "tensor", "group"] = "disk"
    """How weights get to the server. `disk`: in files in `weights_directory`, which the server must see too.
    `tensor`: in the body of requests, which is slower, for a server on another host. `group`: from the
    learner itself, over NCCL or gloo, for a server in its cluster."""
    pause: Literal["in_place", "retract", "drain"] = "in_place"
    """What an update does to running generations. `in_place`: they go on with what they computed before.
    `retract`: they compute it again with the new weights, which is all that a server before 0.5.19 can do.
    `drain`: the update waits for their end."""
    adapter: Literal["merged", "loaded"] = "merged"
    """How a policy with low-rank adapters (`learner.lora`) gets to the server. `merged`: as whole weights,
    which the actor makes of them. `loaded`: the frozen weights once, and each version as an adapter of its
    own, which SGLang adds itself; requests under way end with the version they began with."""
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
    health_every_s: float = Field(10.0, gt=0)
    """Time from one check that the server still generates to the next."""
    health_timeout_s: float = Field(30.0, gt=0)
    """Longest answer time of a check. A server that exceeds it twice counts as dead, and the fleet builds
    another engine."""

    @property
    def servers(self) -> "SglangEngineConfig":
        return self

    @property
    def settings(self) -> dict[str, SglangSetting]:
        """Return the settings in `server` by SGLang's own names, with underscores."""
        return by_name(self.server)

    @property
    def in_files(self) -> bool:
        """Return whether weights that this host has are written to files for the server."""
        return self.update == "disk" or (self.update == "group" and not self.attached)

    def unfit_for_images(self, model_type: str) -> tuple[str, ...]:
        """Return what is wrong with these settings for a vision-language model of this `model_type`, each
        with the remedy."""
        seen = " and ".join(families_with(lambda family: family.sglang_sees))
        problems = (
            (
                not family_named(model_type).sglang_sees,
                f"type=sglang: {model_type} is not known to see at SGLang's servers what the learner sees, "
                f"which {seen} does: set it to embedded, and leave out actors.evaluation.servers and urls",
            ),
            (
                self.disaggregation.enabled,
                "disaggregation.enabled: images go to single servers only: leave it out",
            ),
            (
                self.adapter == "loaded",
                "adapter=loaded: SGLang adds no adapters to a vision tower: set it to merged",
            ),
            (
                self.pause == "retract",
                "pause=retract: SGLang would compute a prompt again, and its images as before: set it to "
                "in_place or drain",
            ),
        )
        return tuple(f"actors.engine.{problem}" for wrong, problem in problems if wrong)

    @model_validator(mode="after")
    def _attached_servers_are_not_ours(self) -> Self:
        for url in self.attached:
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
    def _a_server_alone_loads_adapters(self) -> Self:
        if self.adapter == "merged":
            return self
        if self.update == "group":
            raise ValueError(
                'adapter="loaded" with update="group": the learner sends whole weights there: set '
                "adapter=merged, or update=disk or update=tensor, by which the frozen weights come then"
            )
        if self.disaggregation.enabled:
            raise ValueError(
                'adapter="loaded" with disaggregation.enabled: adapters are loaded into single servers only: '
                "set adapter=merged, or leave out disaggregation"
            )
        for name in ("dp_size", "data_parallel_size"):
            if str(self.settings.get(name, 1)) != "1":
                raise ValueError(
                    f'adapter="loaded" with server.{name}={self.settings[name]!r}: SGLang loads no adapters '
                    "into replicas: set actors.fleet.engines instead, or adapter=merged"
                )
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
        if pair.prefill_url is not None and (pair.prefill or pair.decode):
            raise ValueError(
                f"disaggregation.prefill_url={pair.prefill_url!r} attaches to a server that runs: leave out "
                "disaggregation.prefill and disaggregation.decode"
            )
        return self

    @model_validator(mode="after")
    def _nodes_are_one_engine(self) -> Self:
        if (
            self.nodes == 1
        ):  # or set by the run, where these are one host's own settings (`refuse_stray_node`)
            return self
        if self.node_rank >= self.nodes:
            raise ValueError(f"node_rank={self.node_rank} of nodes={self.nodes}: they count from 0")
        _, _, port = self.rendezvous.rpartition(":")
        if self.rendezvous and not port.isdecimal():
            raise ValueError(f"rendezvous={self.rendezvous!r}: give HOST:PORT, an address of node 0")
        problems = (
            (self.attached, "url or urls: a running server is reached at its first host: leave out nodes"),
            (self.disaggregation.enabled, "disaggregation.enabled: its servers are of one host each"),
            (
                self.adapter == "loaded",
                "adapter=loaded: it is not known to reach all nodes: set adapter=merged",
            ),
            (
                self.update == "group",
                "update=group: SGLang does not tell whether a rank of another node took what the learner "
                "sent: set update=disk or update=tensor",
            ),
            (
                self.update == "disk" and self.weights_directory is None,
                "update=disk: every node reads the files: name a directory that all of them share as "
                "weights_directory, or set update=tensor",
            ),
        )
        if wrong := [problem for found, problem in problems if found]:
            raise ValueError(f"nodes={self.nodes} with {wrong[0]}")
        return self

    @property
    def attached(self) -> tuple[str, ...]:
        """URLs of the running servers; empty where the actor starts its own."""
        return self.urls or (() if self.url is None else (self.url,))

    @property
    def claimed(self) -> tuple[str, ...]:
        """URLs of all running servers that nobody else may use, that for a pair's prompts among them, and the
        place of this node in an engine of several."""
        prefill = self.disaggregation.prefill_url
        if self.nodes > 1:
            return (f"{self.rendezvous}/{self.node_rank}",)
        return tuple(url.rstrip("/") for url in (*self.attached, *([prefill] if prefill else [])))

    def attached_to(self, url: str) -> "SglangEngineConfig":
        """Return the settings of an engine at one of these URLs, or at another that joins. Of those of a
        server it keeps the one without which that does not tell kept sets."""
        own = url in self.attached
        return self.model_copy(
            update={
                "url": url.rstrip("/"),
                "urls": (),
                "server": {name: of for name, of in self.settings.items() if name == MASK_TOKENS},
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
    def adds_adapters(self) -> bool:
        return self.adapter == "loaded"


NOT_QUANTISED = (
    "set learner.publication.quantisation=none for those of the policy; a directory that you chose is undone "
    "by `launch convert dequantise`"
)
"""How weights are had that are not quantised."""


def refuse_quantised(engine: SglangEngineConfig, model: Path | None = None) -> None:
    """Raise `ConfigError` for servers that cannot take quantised weights, as far as settings tell. They are
    those of a directory `model`, or without it those that the learner will publish."""
    which = "quantised weights" if model is None else f"the quantised weights of {model}"
    if engine.attached:
        refuse_running(engine.attached[0], which, setting="actors.engine.url")
    if (chosen := engine.settings.get("quantization")) is not None:
        raise ConfigError(
            f"actors.engine.server.quantization={chosen!r} with {which}: their config.json says how they "
            f"are: leave it out, or have weights that are not quantised: {NOT_QUANTISED}"
        )


def refuse_running(url: str, which: str, *, setting: str) -> None:
    """Raise `ConfigError` for a running server, which `setting` names, that would be given quantised
    weights."""
    raise ConfigError(
        f"{which} for the running server {url}: SGLang does not say how its model is quantised, and one that "
        f"is not would serve codes as weights; leave out {setting}, or have weights that are not quantised: "
        f"{NOT_QUANTISED}"
    )


def refuse_stray_node(engine: SglangEngineConfig) -> None:
    """Raise `ConfigError` for a node of an engine of several that does not know where the others are, and for
    one of an engine that has no other nodes."""
    if engine.nodes == 1 and (engine.node_rank or engine.rendezvous):
        raise ConfigError(
            f"actors.engine.node_rank={engine.node_rank} and rendezvous={engine.rendezvous!r} are for an "
            "engine of several nodes: set actors.engine.nodes, or leave them out"
        )
    if engine.nodes > 1 and not engine.rendezvous:
        raise ConfigError(
            f"actors.engine.nodes={engine.nodes} needs actors.engine.rendezvous=HOST:PORT, an address of "
            "node 0, the same on all of them"
        )


EngineConfig = Annotated[EmbeddedEngineConfig | SglangEngineConfig, Field(discriminator="type")]


def refuse_inexact(engine: EngineSettings, *, exact: bool) -> None:
    """Raise `ConfigError` for an actor's engine that cannot compute as an `exact` run's learner does."""
    if exact and (problem := engine.inexact):
        raise ConfigError(f"this actor's settings do not go with the run's model.numerics=exact: {problem}")
