"""Frozen opponents of an actor: engines of their own, whose answers are not trained on."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Self

from transformers import AutoTokenizer

from actors.engines.fleet.build import build_engine, refuse_other_angles
from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.gpu_plan import gpu_plan
from actors.other_policies.opponent_weights import PublishedWeights, state_of_files
from actors.settings.actors import ActorsConfig
from actors.settings.engines import EngineConfig
from actors.settings.opponents import OpponentConfig
from bus.errors import ConfigError
from bus.messages import PolicyManifest
from bus.process.plugins import refuse_of_record
from bus.waiting import set_within
from storage.model_files.model_reading import lack_of_model
from storage.model_files.packed_files import is_quantised_model
from storage.weights.blob_sources import BlobSource

LOOK_S = 1.0
"""Seconds from one look at the announced policy to the next."""
PATH_VERSION = 0
"""Version that tokens of a model from a directory are recorded with."""


def opponent_engine(name: str, opponent: OpponentConfig, engine: EngineConfig) -> EngineConfig:
    """Return the settings of an opponent's engine. Raises `ConfigError` for servers that are another's."""
    if opponent.engine == "embedded":
        return engine.embedded
    if engine.in_process:
        return engine
    if engine.attached and opponent.url is None:
        raise ConfigError(
            f"actors.engine attaches to {', '.join(engine.attached)}, which have the policy's weights: name "
            f"another server as actors.opponents.{name}.url, or set actors.opponents.{name}.engine=embedded"
        )
    own = engine.servers
    if opponent.url is not None:  # without settings of a server, since nobody asks it what sampling kept
        own = own.attached_to(opponent.url).model_copy(update={"server": {}})
    update = own.update if own.update != "group" else ("tensor" if own.attached else "disk")
    return own.model_copy(update={"update": update, "routed_experts": False, "adapter": "merged"})


class Opponents:
    """Engines by the names of opponents, and what keeps their weights as configured."""

    def __init__(
        self, engines: Mapping[str, Fleet], configs: Mapping[str, OpponentConfig], blobs: BlobSource
    ) -> None:
        self.engines = engines
        self._configs = configs
        self._published = [
            PublishedWeights(name, configs[name], engine, blobs)
            for name, engine in engines.items()
            if configs[name].path is None
        ]

    @classmethod
    def from_config(
        cls, actors: ActorsConfig, model: Path, logs: Path, blobs: BlobSource, *, actor: str
    ) -> Self:
        """Build the engines, not started. Raises `ConfigError` for a model that cannot be an opponent."""
        fleet = actors.fleet.model_copy(update={"engines": 1})
        engines, gpus = dict[str, Fleet](), gpu_plan(actors).opponents
        for name, opponent in actors.opponents.items():
            directory = model
            if opponent.path is not None:
                path = str(opponent.path)
                refuse_of_record(f"actors.opponents.{name}.path {path!r}", path)
                refuse_other_tokenizer(f"actors.opponents.{name}.path", opponent.path, model)
                directory = opponent.path
            settings = opponent_engine(name, opponent, actors.engine)
            refuse_other_angles(settings, directory)
            if settings.in_process and opponent.path is not None:
                refuse_quantised_directory(f"actors.opponents.{name}.path", opponent.path)
            log_file = logs / f"opponent-{name}-{actor}.log"
            build = partial(build_engine, settings, directory, log_file, first_gpu=gpus[name])
            engines[name] = Fleet({f"opponent-{name}": partial(asyncio.to_thread, build)}, fleet)
        return cls(engines, actors.opponents, blobs)

    @property
    def versions(self) -> dict[str, int]:
        """Return the version that each is, -1 before the first."""
        return {name: engine.policy_version for name, engine in self.engines.items()}

    @property
    def failure(self) -> str:
        """Return why an opponent has stopped for good; empty as long as none has."""
        failed = ((name, engine.failure) for name, engine in self.engines.items())
        return next((f"opponent {name}: {failure}" for name, failure in failed if failure), "")

    async def start(self) -> None:
        """Start the engines, and load those that are no published version. Raises `EngineError`, or
        `ConfigError` where that is for the settings."""
        for name, engine in self.engines.items():
            await engine.start()
            path = self._configs[name].path
            if path is not None:
                state = await asyncio.to_thread(state_of_files, path)
                await engine.load_weights(state, PATH_VERSION)

    async def run(self, latest: Callable[[], PolicyManifest | None], stop: asyncio.Event) -> None:
        """Follow the announcements of the policy until `stop`. Raises as `PublishedWeights.follow` does."""
        seen: PolicyManifest | None = None
        while not stop.is_set():
            manifest = latest()
            if manifest is not None and manifest != seen:
                followed = [await weights.follow(manifest) for weights in self._published]
                seen = manifest if all(followed) else seen
            await set_within(stop, LOOK_S)

    async def close(self) -> None:
        for engine in self.engines.values():
            await engine.close()


def refuse_quantised_directory(setting: str, path: Path) -> None:
    """Raise `ConfigError` for a directory, which `setting` names, that the embedded engine cannot read."""
    if is_quantised_model(path):
        raise ConfigError(
            f"{setting}={path} is quantised, and the embedded engine reads weights that are not: undo it "
            "with `launch convert dequantise`, and name what that wrote"
        )


def refuse_other_tokenizer(setting: str, path: Path, model: Path) -> None:
    """Raise `ConfigError` unless the directories `path`, which `setting` names, and `model` have one
    tokenizer."""
    if lack := lack_of_model(path):
        raise ConfigError(f"{setting}={path} is no model directory: {lack}")
    vocabularies = [
        AutoTokenizer.from_pretrained(found, trust_remote_code=False).get_vocab() for found in (path, model)
    ]
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"{setting}={path} has another tokenizer than the run's model: its tokens would mean something "
            "else; give a model with the same one"
        )
