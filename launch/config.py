"""The whole configuration of a run, and how it is put together: defaults < preset < --config file < flags."""

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from actors.config import ActorsConfig, SamplingConfig, SglangEngineConfig
from actors.environments.length_config import LengthProfileConfig
from bus.config import AllowConfig, BusConfig, ColocationConfig, Config
from bus.errors import ConfigError
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.warmup import WarmupConfig
from storage.config import AdmissionConfig, DataConfig, EvaluationConfig, MetricsConfig, ReplayConfig

Layer = Mapping[str, Any]
PARTS = ("bus", "storage", "actors", "learner")
"""The processes of `launch local`."""


class MonitoringConfig(Config):
    """Address at which a process answers `/healthz`, `/readyz` and `/metrics` over HTTP.

    Each process has its own: none is taken over from the run."""

    port: int | None = Field(None, ge=0, le=65535)
    """Port to listen on; 0 takes any that is free, which is logged. None serves nothing. `launch local` gives
    the port to its bus and the next ones to storage, actors and learner."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets other hosts ask."""

    stuck_after_s: float = Field(60.0, gt=0)
    """Silence of the event loop after which `/healthz` says that the process is stuck."""

    nats_port: int | None = Field(None, ge=1, le=65535)
    """Port of this host at which nats-server tells its own numbers (`/varz`, `/jsz`), for its exporter. Only
    `launch bus` reads it, and `launch local` for its bus."""


class ProcessConfig(Config):
    """Settings that every process of a run needs: which run, where its files lie, and its bus."""

    run: str = "default"
    """Name of the run: letters, digits, - and _."""

    directory: Path = Path("runs")
    """Directory of all runs; each run has a subdirectory of its own name."""

    bus: BusConfig = BusConfig()
    """Address of the message bus."""

    allow: AllowConfig = AllowConfig()
    """What this host lets a run do here."""

    monitoring: MonitoringConfig = MonitoringConfig()
    """Probes and metrics of this process over HTTP."""


class LearnerProcess(ProcessConfig):
    """Settings that a learner process may set over those of the run."""

    model: ModelConfig = ModelConfig()
    """Model of the policy."""

    warmup: WarmupConfig = WarmupConfig()
    """Supervised stage before reinforcement learning."""

    learner: LearnerConfig = LearnerConfig()
    """Reinforcement learning."""


class RetrainProcess(Config):
    """Settings that may differ when steps are trained again."""

    run: str = "default"
    """Name of the run: letters, digits, - and _."""

    directory: Path = Path("runs")
    """Directory of all runs; each run has a subdirectory of its own name."""

    learner: LearnerConfig = LearnerConfig()
    """Reinforcement learning."""


class ActorsProcess(ProcessConfig):
    """Settings that an actor process may set over those of the run."""

    actors: ActorsConfig = ActorsConfig()
    """Actor processes, which roll out prompts."""

    colocation: ColocationConfig = ColocationConfig()
    """Sets how engines and learner take turns on the same devices."""


class SupervisionConfig(Config):
    """Sets how `launch local` keeps its processes alive."""

    restarts: int = Field(8, ge=0)
    """Most restarts of one process within `window_s`; one more failure ends the run. The default allows for
    the actors that a prompt ends before it is quarantined: 3 + `admission.max_deliver`."""

    window_s: float = Field(300.0, gt=0)
    """Length of the window, up to now, in which restarts are counted."""

    first_pause_s: float = Field(0.5, ge=0)
    """Pause before the first restart; it doubles with each further one."""

    longest_pause_s: float = Field(30.0, ge=0)
    """Upper bound on the pause before a restart."""

    environment: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Environment variables of single processes, by the name of each: bus, storage, actors, learner. On two
    GPUs: `learner.CUDA_VISIBLE_DEVICES = "0"`, `actors.CUDA_VISIBLE_DEVICES = "1"`."""

    failed_drain_s: float = Field(30.0, gt=0)
    """Longest time that the other processes may take to end once one has failed for good. They may wait for
    that one, so it is shorter than usual."""

    @model_validator(mode="after")
    def _processes_are_there(self) -> Self:
        if unknown := sorted(set(self.environment) - set(PARTS)):
            raise ValueError(f"environment has {unknown[0]!r}, the processes are: {', '.join(PARTS)}")
        return self


class RunConfig(ProcessConfig):
    """The whole configuration of a run."""

    seed: int = Field(0, ge=0)
    """Seed of the initial weights, of the prompt order and of the task generators."""

    data: DataConfig = DataConfig()
    """Prompts to train on and to measure with."""

    admission: AdmissionConfig = AdmissionConfig()
    """Sets how many groups are rolled out, and how stale they may get."""

    replay: ReplayConfig = ReplayConfig()
    """The trajectory store."""

    sampling: SamplingConfig = SamplingConfig()
    """Sets how tokens are sampled."""

    model: ModelConfig = ModelConfig()
    """Model of the policy."""

    warmup: WarmupConfig = WarmupConfig()
    """Supervised stage before reinforcement learning."""

    learner: LearnerConfig = LearnerConfig()
    """Reinforcement learning."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Measurement of the held-out accuracy."""

    metrics: MetricsConfig = MetricsConfig()
    """Where metrics go besides metrics.jsonl."""

    actors: ActorsConfig = ActorsConfig()
    """Actor processes, which roll out prompts."""

    colocation: ColocationConfig = ColocationConfig()
    """Sets how engines and learner take turns on the same devices."""

    supervision: SupervisionConfig = SupervisionConfig()
    """Sets how `launch local` keeps its processes alive."""


def resolve(*layers: Layer) -> RunConfig:
    """Merge `layers` over the defaults, the last wins, and check the result.

    Raises `ConfigError` with every problem, each naming the key, the value and the nearest key there is.
    """
    config = validate(*layers)
    _check_together(config)
    return config


def validate(*layers: Layer) -> RunConfig:
    """Merge and check `layers` as `resolve` does, but do not check sections against each other.

    It serves where further layers may follow.
    """
    try:
        return RunConfig.model_validate(merge(RunConfig().model_dump(), *layers))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from error


def merge(*layers: Layer) -> dict[str, Any]:
    """Merge tables key by key. The last layer wins; a table with another `type` replaces those below it."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = merged.get(key)
            both = isinstance(old, Mapping) and isinstance(value, Mapping)
            merged[key] = merge(old, value) if both and _same_type(old, value) else value  # type: ignore[arg-type]
    return merged


def _same_type(old: Any, value: Any) -> bool:
    return "type" not in value or value["type"] == old.get("type", value["type"])


def preset(name: str) -> dict[str, Any]:
    """Return the preset of that name. Raises `ConfigError` with the nearest match for an unknown one."""
    found = {
        entry.name.removesuffix(".toml"): entry
        for entry in (files("launch") / "presets").iterdir()
        if entry.name.endswith(".toml")
    }
    if name not in found:
        raise ConfigError(
            f"no preset {name!r}: {_nearest(name, found)}the presets are: {', '.join(sorted(found))}; "
            "a file of your own is given with --config"
        )
    return tomllib.loads(found[name].read_text())


def config_file(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file of settings. Raises `ConfigError` when it is missing or malformed."""
    try:
        text = path.read_text()
        loaded = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:
        form = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"the configuration {path} is not {form}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"the configuration {path} is not an object of settings: {text[:40]!r}")
    return loaded


def flags(given: object) -> dict[str, Any]:
    """Return the layer that a command line's flags make; `none` means no value where a setting allows it."""
    return _without_none(given, ()) if isinstance(given, Mapping) else {}  # else it is the default


def _without_none(table: Mapping[str, Any], above: tuple[str, ...]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for key, value in table.items():
        here = (*above, key)
        if isinstance(value, Mapping):
            layer[key] = _without_none(value, here)
        else:
            layer[key] = None if value == "none" and _may_be_none(here) else value
    return layer


def _may_be_none(location: tuple[str, ...]) -> bool:
    field = _fields(location[:-1]).get(location[-1])
    return field is not None and type(None) in get_args(field.annotation)


def _check_together(config: RunConfig) -> None:
    """Refuse settings of one section that do not fit those of another."""
    environment = config.actors.environment
    if isinstance(environment, LengthProfileConfig):
        longest, limit = environment.lengths.longest, config.sampling.max_new_tokens
        if longest > limit:
            raise ConfigError(
                f"actors.environment.lengths: answers of up to {longest} tokens, but "
                f"sampling.max_new_tokens={limit}: raise that, or lower the longest"
            )
    generated = config.data.task is not None and config.data.prompts is None
    if config.learner.target_accuracy and not (config.data.heldout or generated):
        raise ConfigError(
            "learner.target_accuracy needs held-out prompts: give them with --data.heldout, or turn the "
            "target off with --learner.target-accuracy none"
        )
    updates, samples = config.learner.batch.updates, config.admission.samples_per_prompt
    if updates > samples:
        raise ConfigError(
            f"learner.batch.updates={updates} is more than admission.samples_per_prompt={samples}: each "
            f"update trains on some trajectories of every group; set it to {samples} or less"
        )
    for section, optimizer in (("learner", config.learner.optimizer), ("warmup", config.warmup.optimizer)):
        if optimizer.offload and not config.learner.parallel.distributed_optimizer:
            raise ConfigError(
                f"{section}.optimizer.offload={optimizer.offload} needs "
                "learner.parallel.distributed_optimizer=true: set it so, or the offload to 0"
            )
    _check_colocation(config)
    if config.warmup.steps and not (config.warmup.demonstrations or config.data.task):
        raise ConfigError(
            "warmup.steps needs demonstrations: give them with --warmup.demonstrations, or turn the stage "
            "off with --warmup.steps 0"
        )


def _check_colocation(config: RunConfig) -> None:
    """Refuse settings with which learner and engines cannot take turns on a device."""
    if not config.colocation.enabled:
        return
    engine, fleet = config.actors.engine, config.actors.fleet
    if isinstance(engine, SglangEngineConfig) and engine.attached:
        raise ConfigError(
            f"colocation.enabled with actors.engine.{'urls' if engine.urls else 'url'}="
            f"{', '.join(engine.attached)}: only an engine that the actor starts frees its memory for the "
            "learner: leave out one of them, or start that actor with --colocation.no-enabled"
        )
    if getattr(engine, "update", "") == "group":
        raise ConfigError(
            'colocation.enabled with actors.engine.update="group": an engine takes its device back with '
            "weights that its host holds, which then holds none: set actors.engine.update=disk, or leave out "
            "colocation.enabled"
        )
    if isinstance(engine, SglangEngineConfig) and engine.disaggregation.enabled:
        raise ConfigError(
            "colocation.enabled with actors.engine.disaggregation.enabled: the two servers of a pair do not "
            "free their devices for the learner: leave out one of them"
        )
    settings = engine.settings if isinstance(engine, SglangEngineConfig) else {}
    if str(settings.get("enable_memory_saver", True)).lower() == "false":
        raise ConfigError(
            "colocation.enabled needs SGLang's memory saver, and actors.engine.server.enable_memory_saver is "
            "false: leave it out, it is set where it is needed"
        )
    if config.learner.world.nodes > 1:
        raise ConfigError(
            f"colocation.enabled is for a learner on one host, and learner.world.nodes="
            f"{config.learner.world.nodes}: turn one of them off"
        )
    if config.colocation.yield_timeout_s <= fleet.start_timeout_s:
        raise ConfigError(
            f"colocation.yield_timeout_s={config.colocation.yield_timeout_s:g} is not above "
            f"actors.fleet.start_timeout_s={fleet.start_timeout_s:g}: an engine that starts is waited for"
        )


def _explain(problem: Mapping[str, Any]) -> str:
    """Describe one problem that pydantic found, in a line."""
    location = tuple(str(part) for part in problem["loc"])
    key, value = ".".join(_keys(location)), problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            beside = _fields(location[:-1])
            hint = _nearest(location[-1], beside) or f"there are: {', '.join(beside)}"
            return f"unknown key {key}: {hint}".rstrip()
        case "union_tag_invalid":
            wanted, there = problem["ctx"]["tag"], problem["ctx"]["expected_tags"].replace("'", "")
            return f"{key}.type: no {wanted!r}: {_nearest(wanted, there.split(', '))}there are: {there}"
        case "model_type":
            return f"{key} is a table of settings, not a value (got {value!r})"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key}: {message[:1].lower()}{message[1:]} (got {value!r})"


def _fields(location: Iterable[str]) -> Mapping[str, FieldInfo]:
    """Return the settings in the table at `location`; in a union those of the member it names, or of all."""
    section: Any = RunConfig
    for part in location:
        found = _members(section)
        fields = {name: field for member in found for name, field in member.model_fields.items()}
        section = fields[part].annotation if part in fields else _tagged(found, part)
    return {name: field for member in _members(section) for name, field in member.model_fields.items()}


def _members(section: Any) -> list[type[BaseModel]]:
    """Return the table, or each table of a union."""
    return [
        member
        for member in (section, *get_args(section))
        if isinstance(member, type) and issubclass(member, BaseModel)
    ]


def _tagged(members: Iterable[type[BaseModel]], tag: str) -> Any:
    return next((member for member in members if member.model_fields["type"].default == tag), None)


def _keys(location: tuple[str, ...]) -> Iterator[str]:
    """Return `location` as a file has it: pydantic inserts the `type` that chose a member of a union."""
    for n, part in enumerate(location):
        last = n == len(location) - 1
        if last or part in _fields(location[:n]):
            yield part


def _nearest(name: str, names: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"did you mean {match[0]!r}? " if match else ""


def refuse_full_context(config: RunConfig) -> None:
    """Raise `ConfigError` for answers that leave no room for a prompt in the model's context.

    A model on another host is not seen from here: storage checks it, when the learner has published it."""
    limit, context = config.sampling.max_new_tokens, config.model.scratch.context
    name = "model.scratch.context is"
    if config.model.path is not None:
        found = _context_of(config.model.path)
        if found is None:
            return
        context, name = found, f"{config.model.path} has a context of"
    elif config.model.scratch == type(config.model.scratch)():
        return  # nobody has chosen that model: the learner's host may name another
    if limit >= context:
        raise ConfigError(
            f"sampling.max_new_tokens={limit} leaves no room for a prompt, since {name} {context}: lower it"
        )


def _context_of(model: Path) -> int | None:
    """Return the context that a model directory's config.json names, if it is here and names one."""
    try:
        found = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):  # whoever loads the model says what is wrong with it
        return None
    if not isinstance(found, dict):
        return None
    text = found.get("text_config")
    context = (text if isinstance(text, dict) else found).get("max_position_embeddings")
    return context if isinstance(context, int) else None
