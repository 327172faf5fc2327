"""The whole configuration of a run, and how it is put together: defaults < preset < --config file < flags."""

import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from actors.settings.actors import ActorsConfig, SamplingConfig
from bus.config import AllowConfig, BusConfig, ColocationConfig, Config
from bus.errors import ConfigError, nearest
from bus.policy_names import DEFAULT_POLICY, policy_run
from launch.settings.config_checks import check_together
from launch.settings.policies import (
    PolicyConfig,
    policy_bus,
    refuse_other_bases,
    refuse_shared_engines,
    refuse_shared_master,
    with_lasting_transport,
)
from launch.settings.slurm import SlurmConfig
from launch.settings.tree import file_keys, may_be_none, settings_at, with_lists
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.warmup import WarmupConfig
from storage.settings.admission import AdmissionConfig
from storage.settings.data import DataConfig
from storage.settings.evaluation import EvaluationConfig
from storage.settings.metrics import MetricsConfig
from storage.settings.replay import ReplayConfig

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
    alert_command: str | None = None
    """Program with arguments, without a shell, that gets an object of JSON on its standard input when the run
    fails or is lost, and when an alarm of its learner begins. `launch local` and `launch storage` read it."""
    alert_url: str | None = Field(None, pattern=r"^https?://")
    """Address to which the same object is posted. Address and arguments lie in config.json and on the bus: a
    secret belongs into the program."""

    @field_validator("alert_command")
    @classmethod
    def _is_a_command_line(cls, command: str | None) -> str | None:
        shlex.split(command or "")  # raises ValueError for a quote without its end
        return command


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
    """Environment variables of single processes, by the name of each: bus, storage, actors, learner, and
    learner-NAME for that of a further policy. On two GPUs: `learner.CUDA_VISIBLE_DEVICES = "0"`,
    `actors.CUDA_VISIBLE_DEVICES = "1"`."""
    failed_drain_s: float = Field(30.0, gt=0)
    """Longest time that the other processes may take to end once one has failed for good. They may wait for
    that one, so it is shorter than usual."""


class RunConfig(ProcessConfig):
    """The whole configuration of a run."""

    seed: int = Field(0, ge=0)
    """Seed of initial weights, prompt order and built-in tasks."""
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
    """Measurement of the held-out reward."""
    metrics: MetricsConfig = MetricsConfig()
    """Where metrics go besides metrics.jsonl."""
    actors: ActorsConfig = ActorsConfig()
    """Actor processes, which roll out prompts."""
    colocation: ColocationConfig = ColocationConfig()
    """Sets how engines and learner take turns on the same devices."""
    supervision: SupervisionConfig = SupervisionConfig()
    """Sets how `launch local` keeps its processes alive."""
    slurm: SlurmConfig = SlurmConfig()
    """Sets the jobs of `launch slurm`."""
    policies: dict[str, PolicyConfig] = Field(default_factory=dict)
    """Policies that are trained beside the run's own."""
    trains: str = DEFAULT_POLICY
    """Name of the policy that this run trains. Storage sets it for the run of a further policy; leave it
    as it is."""

    @property
    def parts(self) -> tuple[str, ...]:
        return (*PARTS, *(f"learner-{name}" for name in self.policies))

    @property
    def has_rollouts(self) -> bool:
        """Tell whether the run has actors: one on demonstrations alone has none where nothing is measured."""
        measured = self.data.heldout or self.data.task or self.evaluation.sets
        return bool(self.learner.steps or measured)

    @model_validator(mode="after")
    def _processes_are_there(self) -> Self:
        if unknown := sorted(set(self.supervision.environment) - set(self.parts)):
            raise ValueError(
                f"supervision.environment has {unknown[0]!r}, the processes are: {', '.join(self.parts)}"
            )
        return self


def resolve(*layers: Layer) -> RunConfig:
    """Merge `layers` over the defaults, the last wins, and check the result. Raises `ConfigError` with every
    problem, each naming the key, the value and the nearest key there is."""
    config = validate(*layers)
    check_together(config)
    further = {name: of_policy(config, name) for name in config.policies}
    refuse_shared_engines(config, {name: one.actors.engine for name, one in further.items()})
    refuse_other_bases(config, further)
    refuse_shared_master(config, {name: one.learner.world for name, one in further.items()})
    return config


def of_policy(config: RunConfig, name: str) -> RunConfig:
    """Return the settings of the run that trains a further policy: those of `config`, with its own over them.

    It measures nothing: held-out prompts are answered by all policies together, in the run itself. Its events
    for TensorBoard are in a directory of its own in that of the run. Raises `ConfigError` for a policy that
    the run does not have, and for settings that cannot be."""
    if name not in config.policies:
        there = ", ".join(config.policies) or "none"
        raise ConfigError(
            f"run {config.run!r} trains no policy {name!r} beside its own: "
            f"{nearest(name, config.policies)}there are: {there}"
        )
    own = config.policies[name]
    inherited = config.model_copy(
        update={
            "policies": {},
            "evaluation": EvaluationConfig(),
            "monitoring": MonitoringConfig(),
            "actors": config.actors.model_copy(update={"opponents": {}}),
            "supervision": SupervisionConfig(),
        }
    )
    events = config.metrics.tensorboard_directory
    layer = {
        "metrics": {"tensorboard_directory": None if events is None else events / name},
        "run": policy_run(config.run, name),
        "trains": name,
        "data": {"heldout": None, "curriculum": {"type": "none"}},
        "model": own.model,
        "warmup": own.warmup,
        "learner": {"target_accuracy": None, **own.learner},
        "actors": {"engine": own.engine},
    }
    try:
        found = validate(inherited.model_dump(), with_lists(RunConfig, flags(layer)))
        check_together(found)
    except ConfigError as error:
        raise ConfigError(f"policies.{name}: {error}") from error
    return with_lasting_transport(found)


def policy_config(config: RunConfig, name: str) -> RunConfig:
    """Return the settings of a further policy's run, with the way to reach it on the bus."""
    found = of_policy(config, name)
    return found.model_copy(update={"bus": policy_bus(config.bus, config.run, name)})


def validate(*layers: Layer) -> RunConfig:
    """Merge and check `layers` as `resolve` does, but do not check sections against each other. It serves
    where further layers may follow."""
    merged = merge(RunConfig().model_dump(), *layers)
    if empty := list(_empty_values(merged, ())):
        raise ConfigError("\n".join(f"{name} is empty: name a value, or give none" for name in empty))
    try:
        return RunConfig.model_validate(merged)
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
    found = _presets()
    if name not in found:
        raise ConfigError(
            f"no preset {name!r}: {nearest(name, found)}the presets are: {', '.join(sorted(found))}; "
            "a file of your own is given with --config"
        )
    return tomllib.loads(found[name].read_text())


def preset_names() -> list[str]:
    return sorted(_presets())


def _presets() -> dict[str, Traversable]:
    return {
        entry.name.removesuffix(".toml"): entry
        for entry in (files("launch") / "presets").iterdir()
        if entry.name.endswith(".toml")
    }


def config_file(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file of settings, where "none" in TOML means no value, which TOML cannot say.
    Raises `ConfigError` when it is missing or malformed."""
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
    return _with_tables(loaded) if path.suffix == ".json" else flags(loaded)


def flags(given: object) -> dict[str, Any]:
    """Return the layer that a command line's flags make; `none` means no value where a setting allows it.
    Raises `ConfigError` for a value in place of a section."""
    return _with_tables(_without_none(given, ())) if isinstance(given, Mapping) else {}  # else the default


def _with_tables(layer: dict[str, Any]) -> dict[str, Any]:
    """Return `layer`, whose sections readers take for tables before all layers are here and are checked.
    Raises `ConfigError` for a value in place of a table, and for a wrong one outside of tables."""
    for key, value in layer.items():
        if key in RunConfig.model_fields and not isinstance(value, Mapping):
            validate({key: value})
    return layer


def _without_none(table: Mapping[str, Any], above: tuple[str, ...]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for key, value in table.items():
        here = (*above, key)
        if isinstance(value, Mapping):
            layer[key] = _without_none(value, here)
        elif isinstance(value, list):
            layer[key] = [_without_none(one, here) if isinstance(one, Mapping) else one for one in value]
        else:
            layer[key] = None if value == "none" and may_be_none(RunConfig, here) else value
    return layer


def _empty_values(table: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[str]:
    """Yield settings that may have no value and have an empty text instead. A shell writes one for a variable
    that is not set, and an empty path would be the present directory."""
    for key, value in table.items():
        here = (*above, key)
        if isinstance(value, Mapping):
            yield from _empty_values(value, here)
        elif value == "" and may_be_none(RunConfig, here):
            yield ".".join(here)


def _explain(problem: Mapping[str, Any]) -> str:
    """Describe one problem that pydantic found, in a line."""
    location = tuple(str(part) for part in problem["loc"])
    key, value = ".".join(file_keys(RunConfig, location)), problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            beside = settings_at(RunConfig, location[:-1])
            hint = nearest(location[-1], beside) or f"there are: {', '.join(beside)}"
            return f"unknown key {key}: {hint}".rstrip()
        case "union_tag_invalid":
            wanted, there = problem["ctx"]["tag"], problem["ctx"]["expected_tags"].replace("'", "")
            return f"{key}.type: no {wanted!r}: {nearest(wanted, there.split(', '))}there are: {there}"
        case "model_type":
            first = next(iter(settings_at(RunConfig, location)))
            return (
                f"{key} is a table of settings, not a value (got {value!r}): name one, such as {key}.{first}"
            )
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    # A check of several settings names those that it is about: their whole table would fill a screen.
    got = "" if isinstance(value, Mapping) else f" (got {value!r})"
    return f"{key}: {message[:1].lower()}{message[1:]}{got}"
