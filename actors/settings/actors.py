"""Settings of the rollout side: sampling, environments, and all that an actor has. Loads without torch."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from actors.settings.agents import AgentConfig
from actors.settings.clients import ClientsConfig
from actors.settings.engines import EmbeddedEngineConfig, EngineConfig
from actors.settings.environment import EnvironmentSettings, OneAnswerSettings
from actors.settings.evaluation import EvaluationEngine, EvaluatorConfig
from actors.settings.fleet import FleetConfig
from actors.settings.games import GameConfig
from actors.settings.groups import FailureLimitsConfig, GroupLimitsConfig, InterruptionConfig, RetriesConfig
from actors.settings.length_profile import LengthProfileConfig
from actors.settings.opponents import OpponentConfig, refuse_misnamed
from actors.settings.panel import DebateConfig, PanelConfig
from actors.settings.rewards import RewardConfig, UnfinishedConfig
from actors.settings.tool_chat import ToolsConfig
from bus.config import LEAST_TEMPERATURE, MOST_KEPT, Config
from storage.settings.weights_transport import PeerConfig

REST_S = 90.0
"""Longest time to pause, continue and end a SGLang server, besides starting it or loading weights."""


class SamplingConfig(Config):
    """How rollouts sample tokens."""

    temperature: float = Field(1.0, ge=LEAST_TEMPERATURE)
    """Divisor of logits before the softmax; the learner's log-probs use the same value."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass of the likeliest tokens that are kept; 1 keeps all, as the learner assumes."""
    top_k: int = Field(0, ge=0)
    """Number of the likeliest tokens that are kept; 0 keeps all, as the learner assumes."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Least probability of the tokens that are kept, as a fraction of the likeliest one's; 0 keeps all."""
    keep_masks: bool = False
    """Record which tokens were kept where some are cut off, so that the learner computes log-probs over the
    same ones; at most 1024 are kept then. An SGLang server has to return sampling masks, as 0.5.23 does."""
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


class SingleTurnConfig(OneAnswerSettings, RewardConfig):
    """Environment in which an episode is one prompt, one completion and one reward."""

    type: Literal["single_turn"] = "single_turn"
    built_by: ClassVar[str] = "actors.environments.single_turn:SingleTurn.from_config"
    scores_one_answer: ClassVar[bool] = True


class PluginEnvironmentConfig(EnvironmentSettings, UnfinishedConfig):
    """Environment of the user's own."""

    type: Literal["plugin"]
    built_by: ClassVar[str] = "actors.environments.plugin:plugin_environment"
    environment: str
    """Class of the environment, as `my_pkg.my_module:Class`."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the environment, which its nested class `Settings` declares."""
    rollout_timeout_s: float = Field(7200.0, gt=0)
    """Longest time that a rollout, or the rewards of a group, may take before it ends as `timeout`."""
    agents: tuple[str, ...] = ()
    """Names of all its agents, by which a start finds an agent of `policies` that does not exist. Without
    them nothing is checked."""

    @property
    def agent_names(self) -> tuple[str, ...] | None:
        return self.agents or None


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
    """Name by which the environment is chosen: letters, digits, - and _."""
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
    weights: PeerConfig = PeerConfig()
    """How the actor passes weights on to others; it applies where the learner publishes over HTTP."""
    group_filter: str = "none"
    """Filter of groups that are worth training on: none, zero_variance, or `my_pkg.my_module:function`."""
    group_limits: GroupLimitsConfig = GroupLimitsConfig()
    """Bounds on rewards and lengths of groups that are trained on, which apply before the filter."""
    retries: RetriesConfig = RetriesConfig()
    """How often a rollout that something around the policy failed is repeated."""
    failures: FailureLimitsConfig = FailureLimitsConfig()
    """Failures of rewards and environments at which the run ends."""
    interruption: InterruptionConfig = InterruptionConfig()
    """What becomes of rollouts that go on when the actor ends."""
    groups_at_once: int = Field(64, ge=1)
    """Most prompt leases that this process rolls out at the same time."""
    share_after_s: float | None = Field(5.0, ge=0)
    """Time after its end at which a rollout is stored though others of its group still run, so that an
    actor's death costs only unfinished ones. `None` hands over complete groups only."""
    tool_calls: Literal[
        "auto", "command", "deepseek", "gemma4", "glm45", "harmony", "hermes", "invoke", "jamba", "kimi",
        "lfm2", "lfm2_plain", "llama3", "mistral", "nemotron", "olmo3", "phi4", "qwen3_coder",
    ] = "auto"  # fmt: skip
    """How the model writes tool calls; with `auto` the chat template writes some, and what reads them is
    taken."""
    mask_older_versions: int | None = Field(None, ge=0)
    """Policy versions that a token may lag the newest token of its trajectory and still be trained on. Older
    tokens are masked, and recorded as such. `None` trains on all; the correction weighs them."""
    mask_older_kv: bool = False
    """Whether tokens are left out of training that were sampled over keys and values of older weights than
    their own: those of a generation that an update interrupted and that went on with what it had computed.
    Otherwise the correction weighs them, like all tokens, by the log-probs that they were drawn with."""
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
        default: EvaluationEngine = "own" if self.engine.in_process else "rollout"
        return default if self.evaluation.engine == "auto" else self.evaluation.engine

    @property
    def by_name(self) -> Mapping[str, EnvironmentConfig]:
        """Return all environments by name, first that of prompts that choose none, whose name is empty."""
        return {"": self.environment, **{one.name: one.environment for one in self.environments}}

    @property
    def offers_native_tools(self) -> bool:
        """Tell whether an environment has tools whose calls are read as the model writes them."""
        return any(one.reads_native_calls for one in self.by_name.values())

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
        if self.environments and any(one.takes_leases_on_demand for one in self.by_name.values()):
            raise ValueError(
                "environments with type=clients: leases are taken when clients ask for them, which those of "
                "another environment would wait for: leave out environments, or that type"
            )
        return self

    @model_validator(mode="after")
    def _a_url_is_one_engine(self) -> Self:
        urls = self.engine.attached
        if urls and self.fleet.engines not in (1, len(urls)):
            raise ValueError(
                f"engine.urls names {len(urls)} servers, fleet.engines={self.fleet.engines}: leave that out, "
                "each URL is an engine"
            )
        return self

    @model_validator(mode="after")
    def _an_engine_speaks_before_the_fleet_gives_it_up(self) -> Self:
        """Refuse limits of the fleet below those of the engine, whose error says what took too long."""
        if not self.engine.in_process:
            for limit in ("start_timeout_s", "update_timeout_s"):
                own, fleets = getattr(self.engine, limit), getattr(self.fleet, limit)
                twice = limit == "update_timeout_s" and self.engine.servers.update == "group"
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
        both = {url.rstrip("/") for url in self.engine.attached} & {
            url.rstrip("/") for url in self.evaluation.urls
        }
        if both:
            raise ValueError(
                f"evaluation.urls names {min(both)}, which rolls out with other weights (engine.urls): name "
                'another server, or set evaluation.engine="rollout" and leave out evaluation.urls'
            )
        if self.evaluation.only and self.environment.takes_leases_on_demand:
            raise ValueError(
                f"evaluation.only=true with environment.type={self.environment.type}: no held-out prompts "
                "are offered to clients: leave out one of them"
            )
        return self
