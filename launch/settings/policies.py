"""Policies that a run trains beside its own: their settings, and whether somebody plays them. Each has a run
of its own on the bus and on the disk, so that versions, leases, groups and checkpoints are kept apart, and
all that holds for a run holds for each policy."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, JsonValue, field_validator

from actors.engines.fleet.gpu_plan import gpu_plan, gpus_used
from actors.episodes.agents import policy_of
from actors.settings.actors import ActorsConfig
from actors.settings.engines import EngineConfig
from actors.settings.environment import EnvironmentSettings
from actors.settings.opponents import TAKEN, refuse_misnamed
from bus.config import BusConfig, Config
from bus.errors import ConfigError, nearest
from bus.policy_names import DEFAULT_POLICY, policy_run
from learner.config.parallel import WorldConfig

if TYPE_CHECKING:
    from launch.settings.run_config import RunConfig

_NAME = re.compile(r"[A-Za-z0-9](?:-?[A-Za-z0-9])*")
"""Agents of games."""
LONGEST_RUN = 64
"""Longest name that a run may have."""


class PolicyConfig(Config):
    """A policy that is trained beside the run's own: with a learner, weights and engines of its own."""

    agents: tuple[str, ...] = ()
    """Agents of the environments that it is. `rewriter` stands for `rewriter-1`, `rewriter-2` and so on too.
    An environment may also name the policy itself, as a game does by `opponent`. Commas separate several in
    one text, such as a flag's."""
    model: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of its model, over those of `model`. Its tokenizer must be that of the run's own policy."""
    warmup: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of its supervised stage, over those of `warmup`."""
    learner: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of its learner, over those of `learner`."""
    engine: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of its engines, over those of `actors.engine`."""
    shares_servers: bool = True
    """Whether SGLang's servers that add adapters themselves (`actors.engine.adapter = "loaded"`) serve it
    beside the run's own policy. It has that policy's frozen weights then. With settings in `engine` that
    differ from `actors.engine` it has servers of its own, as with `false`."""

    @field_validator("agents", mode="before")
    @classmethod
    def _separated_by_commas(cls, given: object) -> object:
        return [agent.strip() for agent in given.split(",")] if isinstance(given, str) else given

    @field_validator("model", "warmup", "learner", "engine", mode="before")
    @classmethod
    def _names_of_flags(cls, given: object) -> object:
        """Take `save-every` of a flag for `save_every`, as all other flags are taken."""
        if not isinstance(given, dict):
            return given
        return {str(key).replace("-", "_"): cls._names_of_flags(value) for key, value in given.items()}


def policy_bus(bus: BusConfig, run: str, policy: str) -> BusConfig:
    """Return how a process that works for `run` reaches the run of a further policy on the same bus. Its
    credentials are those of the same role, which lie beside those of `run`: DIR/RUN__POLICY/ROLE.creds."""
    if bus.creds is None:
        return bus
    beside: Path = bus.creds.parent.parent / policy_run(run, policy) / bus.creds.name
    return bus.model_copy(update={"creds": beside})


def refuse_policies(config: "RunConfig") -> None:
    """Raise `ConfigError` for policies that cannot be told apart, that nobody plays, or that an environment
    names and the run does not train. The run of a further policy was checked as part of its own run."""
    if config.trains != DEFAULT_POLICY:
        _refuse_transport(config)
        return
    if config.policies and config.colocation.enabled:
        raise ConfigError(
            f"colocation.enabled with policies ({', '.join(config.policies)}): engines of further policies "
            "do not leave the device to a learner: leave out one of them"
        )
    if config.policies and config.actors.evaluation.only:
        raise ConfigError(
            f"actors.evaluation.only with policies ({', '.join(config.policies)}): an actor that only "
            "evaluates has no engines of further policies: leave out one of them"
        )
    for name in config.policies:
        _refuse_name(config, name)
    _refuse_agents_of_two(config)
    for environment in config.actors.by_name.values():
        _refuse_unknown(config, environment.opponents_named, environment.opponent_setting)
        _refuse_opponent_on_both_sides(config, environment)
    if config.policies:
        _refuse_unplayed(config)


def with_lasting_transport(config: "RunConfig") -> "RunConfig":
    """Return the settings of a further policy, with a transport whose weights outlive its learner."""
    publication = config.learner.publication
    lasting = publication.transport.lasting
    if lasting is publication.transport:
        return config
    publication = publication.model_copy(update={"transport": lasting})
    learner = config.learner.model_copy(update={"publication": publication})
    return config.model_copy(update={"learner": learner})


def _refuse_transport(config: "RunConfig") -> None:
    """Refuse weights that a learner itself serves: a further policy plays on when its learner is done."""
    transport = config.learner.publication.transport
    if transport.served_by_learner:
        raise ConfigError(
            f"learner.publication.transport.type={transport.type}: the learner of a further policy ends when "
            "it is done, perhaps before the run, and actors that start after that could not fetch its "
            f"weights: set policies.{config.trains}.learner.publication.transport.type=files, with a "
            "directory that all hosts mount, or bus for weights of up to a fourth of bus.streams.weights_mib"
        )


def _refuse_unknown(config: "RunConfig", asked: tuple[str, ...], setting: str) -> None:
    try:
        refuse_misnamed([*config.actors.opponents, *config.policies], asked, setting=setting)
    except ValueError as error:
        raise ConfigError(f"actors: {error}") from error


def _refuse_opponent_on_both_sides(config: "RunConfig", environment: EnvironmentSettings) -> None:
    """Refuse an opponent that is a policy of the run whose agents are players too: it would play itself."""
    for name in environment.opponents_named:
        agents = config.policies[name].agents if name in config.policies else ()
        players = [agent for agent in agents if environment.lets_opponent_play(agent)]
        if players:
            setting = next(one for one, value in environment if value == name)
            raise ConfigError(
                f"policies.{name}.agents has {players[0]!r}, and environment.{setting}={name!r} has it play "
                f"against whoever that is: leave it out of the agents, or set environment.{setting}=self to "
                "have each agent play its side"
            )


def _refuse_name(config: "RunConfig", name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"policies.{name}: a name is letters and digits, with single - between them")
    if name in (*TAKEN, *config.actors.opponents):
        what = "an opponent" if name in config.actors.opponents else "another player"
        raise ConfigError(f"policies.{name}: this name is that of {what}: choose another one")
    if len(policy_run(config.run, name)) > LONGEST_RUN:
        raise ConfigError(
            f"policies.{name}: its own run would be {policy_run(config.run, name)!r}, and a run's name has "
            f"{LONGEST_RUN} characters at most: choose a shorter one"
        )


def _refuse_agents_of_two(config: "RunConfig") -> None:
    found: dict[str, str] = {}
    for name, policy in config.policies.items():
        for agent in policy.agents:
            if agent in found:
                raise ConfigError(
                    f"policies.{name}.agents: agent {agent!r} is policy {found[agent]!r} already: leave it "
                    "out of one of them"
                )
            found[agent] = name


def _refuse_unplayed(config: "RunConfig") -> None:
    """Refuse a policy that no agent is. Agents of an environment that is a user's own are not known."""
    named, agents, others = set[str](), set[str](), False
    for environment in config.actors.by_name.values():
        known = environment.agent_names
        others = others or known is None
        agents |= set(known or ())
        named |= set(environment.opponents_named)
    assigned = {agent: name for name, one in config.policies.items() for agent in one.agents}
    players = {agent: policy_of(agent, assigned) for agent in agents}
    for agent, name in assigned.items():
        if not others and not any(policy_of(one, {agent: name}) == name for one in agents):
            raise ConfigError(
                f"policies.{name}.agents: no environment has an agent {agent!r}: "
                f"{nearest(agent, agents)}there are: {', '.join(sorted(agents))}"
            )
    for name, policy in config.policies.items():
        if not (policy.agents or name in named) and not others:
            raise ConfigError(
                f"policies.{name}: no agent is this policy: name some in policies.{name}.agents, of "
                f"{', '.join(sorted(agents))}, or have an environment name it, as opponent={name!r}"
            )
    if not others and DEFAULT_POLICY not in players.values():
        raise ConfigError(
            f"policies: all agents ({', '.join(sorted(agents))}) are further policies, and the run's own is "
            "none: leave at least one to it"
        )


def shares_servers(config: "RunConfig", name: str, engine: EngineConfig) -> bool:
    """Tell whether the servers of the run's own policy serve a further policy too, whose engines have these
    settings: SGLang's, where they add the adapters of each policy themselves."""
    same = engine == config.actors.engine and config.policies[name].shares_servers
    return engine.adds_adapters and same


def refuse_other_bases(config: "RunConfig", further: Mapping[str, "RunConfig"]) -> None:
    """Raise `ConfigError` for policies, by name, that are to be at the run's own servers with other frozen
    weights. Actors compare the weights themselves, too."""
    for name, one in further.items():
        if not shares_servers(config, name, one.actors.engine):
            continue
        bases = [
            {"model.path": each.model.path, "model.scratch": each.model.scratch,
             "learner.publish_dtype": each.learner.publish_dtype}
            for each in (config, one)
        ]  # fmt: skip
        if differs := next((setting for setting in bases[0] if bases[0][setting] != bases[1][setting]), None):
            raise ConfigError(
                f"policies.{name}.{differs}={bases[1][differs]} differs from that of the run's own policy, "
                "whose servers would add its adapters to other weights: leave it out, or set "
                f"policies.{name}.shares_servers=false, for servers of its own"
            )


def refuse_shared_master(config: "RunConfig", learners: Mapping[str, WorldConfig]) -> None:
    """Raise `ConfigError` for learners of further policies, by name, whose hosts would meet those of another
    learner. Addresses that are given to each learner when it is started are not known here."""
    used: dict[str, str] = {}
    for name, world in {DEFAULT_POLICY: config.learner.world, **learners}.items():
        if world.nodes == 1 or world.master is None:
            continue
        if world.master in used:
            raise ConfigError(
                f"policies.{name}.learner.world.master={world.master} is where the hosts of policy "
                f"{used[world.master]!r} meet: name another port, as policies.{name}.learner.world.master"
            )
        used[world.master] = name


def refuse_shared_engines(config: "RunConfig", engines: Mapping[str, EngineConfig]) -> None:
    """Raise `ConfigError` for engines of further policies, by name, that share a server or a GPU with others
    of the run, or that do not record what the others do. Those at the run's own servers share all of it."""
    for name, engine in engines.items():
        if engine.routed_experts != config.actors.engine.routed_experts:
            raise ConfigError(
                f"policies.{name}.engine.routed_experts={engine.routed_experts} differs from "
                "actors.engine.routed_experts: trajectories record them for all policies or for none"
            )
    apart = {name: one for name, one in engines.items() if not shares_servers(config, name, one)}
    _refuse_shared_servers(config.actors, apart)
    _refuse_shared_gpus(config, apart)


def _refuse_shared_servers(actors: ActorsConfig, engines: Mapping[str, EngineConfig]) -> None:
    opponents = actors.opponents.items()
    used = {
        **dict.fromkeys(actors.engine.claimed, "policy 'default'"),
        **{one.url.rstrip("/"): f"opponent {name!r}" for name, one in opponents if one.url is not None},
        **{url.rstrip("/"): "the version that is evaluated" for url in actors.evaluation.urls},
    }
    for name, engine in engines.items():
        for url in engine.claimed:
            if url in used:
                raise ConfigError(
                    f"policies.{name}.engine attaches to {url}, which has the weights of {used[url]}: name "
                    f"another server as policies.{name}.engine.url"
                )
            used[url] = f"policy {name!r}"


def _refuse_shared_gpus(config: "RunConfig", engines: Mapping[str, EngineConfig]) -> None:
    """Refuse GPUs of two policies where the user placed one, unless it is placed in its own settings. A
    policy that inherits the first GPU of the run's own would have its servers start there too."""
    plan = gpu_plan(config.actors, engines)
    used = {DEFAULT_POLICY: gpus_used(config.actors.engine, plan.rollouts)}
    for name, engine in engines.items():
        own = gpus_used(engine, plan.policies[name])
        for other, theirs in used.items():
            if own & theirs and not _placed(config.policies[name]):
                raise ConfigError(
                    f"policies.{name}.engine: its servers would use GPU {min(own & theirs)}, as those of "
                    f"policy {other!r} do: say which is its first, as policies.{name}.engine.server."
                    f"base_gpu_id={max(set[int]().union(*used.values())) + 1}; a policy whose own settings "
                    "name a GPU may share it"
                )
        used[name] = own


def _placed(policy: PolicyConfig) -> bool:
    """Return whether the policy's own settings say on which GPU its engines begin."""
    server = policy.engine.get("server")
    return isinstance(server, Mapping) and any(key.replace("-", "_") == "base_gpu_id" for key in server)
