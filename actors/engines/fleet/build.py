"""Builds the engines that a configuration names."""

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

from actors.engines.base import Engine
from actors.engines.dynamic_angles import refuse_dynamic_angles
from actors.engines.served_adapters import ServedAdapters
from actors.settings.engines import EmbeddedEngineConfig, EngineConfig, SglangEngineConfig
from bus.errors import ConfigError
from bus.process.process_tuning import no_collections
from storage.images.reader import ImageReader

if TYPE_CHECKING:
    from actors.engines.fleet.member import Build


class EnginePlace(NamedTuple):
    """What an actor gives an engine beside its settings and the model, as `build_engine` takes it."""

    log_file: Path
    first_gpu: int = 0
    served: ServedAdapters | None = None
    exact: bool = False


def build_engine(
    config: EngineConfig, model: Path, log_file: Path, *, first_gpu: int = 0,
    served: ServedAdapters | None = None, exact: bool = False,
) -> Engine:  # fmt: skip
    """Return an engine for the model in a directory, not started. Raises `ConfigError` for a model that a
    server would compute otherwise than the learner."""
    place = EnginePlace(log_file, first_gpu, served, exact)
    engine: Engine = resolve_name(config.built_by)(config, model, place)
    return engine


def embedded_engine(config: EmbeddedEngineConfig, model: Path, place: EnginePlace) -> Engine:
    with no_collections():
        from actors.engines.embedded.engine import EmbeddedEngine

    return EmbeddedEngine.from_directory(model, config, exact=place.exact)


def sglang_engine(config: SglangEngineConfig, model: Path, place: EnginePlace) -> Engine:
    """Return an engine of SGLang. Raises `ConfigError` as `refuse_other_angles` does."""
    from actors.engines.sglang.engine import SglangEngine

    refuse_other_angles(config, model)
    return SglangEngine(model, config, place.log_file, first_gpu=place.first_gpu, served=place.served)


def refuse_other_angles(config: EngineConfig, model: Path) -> None:
    """Raise `ConfigError` for a model that SGLang computes otherwise than transformers."""
    if not config.in_process:
        refuse_dynamic_angles(model, json.loads((model / "config.json").read_text()))


def refuse_unfit_model(config: EngineConfig, model: Path) -> None:
    """Raise `ConfigError` for a model that SGLang computes otherwise than transformers, and for a
    vision-language model on an engine whose settings do not fit one."""
    if config.in_process:
        return
    refuse_other_angles(config, model)
    reader = ImageReader.of(model)
    if reader is not None and (problems := config.servers.unfit_for_images(reader.model_type)):
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ConfigError(f"{model} is a vision-language model (docs/vision.md):\n{listed}")


def engine_builds(
    config: EngineConfig, model: Path, first_gpus: Mapping[str, int], logs: Path, *, actor: str,
    served: ServedAdapters | None = None, exact: bool = False,
) -> "Mapping[str, Build]":  # fmt: skip
    """Return what builds each engine in a thread, by its name."""

    def build(name: str, first_gpu: int) -> Engine:
        named = name if name.startswith("engine-") else f"engine-{name}"
        log_file = logs / f"{named}-{actor}.log"
        return build_engine(config, model, log_file, first_gpu=first_gpu, served=served, exact=exact)

    return {name: partial(asyncio.to_thread, build, name, gpu) for name, gpu in first_gpus.items()}


def evaluation_engine(config: EngineConfig, model: Path) -> Engine:
    """Return an engine in this process for held-out prompts, which keeps one version while others go on."""
    from actors.engines.embedded.engine import EmbeddedEngine

    return EmbeddedEngine.from_directory(model, config.embedded)
