"""Builds the engine that a configuration names."""

from pathlib import Path

from actors.config import EmbeddedEngineConfig, EngineConfig
from actors.engines.base import Engine


def build_engine(config: EngineConfig, model: Path, log_file: Path, *, number: int = 0) -> Engine:
    """Return an engine for the model in a directory, not started.

    Args:
        config: type and settings of the engine.
        model: config.json and tokenizer; weights come by `load_weights`.
        log_file: receives the output of an engine in a process of its own.
        number: number of the engine in its process, from 0, which decides on the GPUs of a server."""
    if isinstance(config, EmbeddedEngineConfig):
        from actors.engines.embedded.engine import EmbeddedEngine

        return EmbeddedEngine.from_directory(model, config)
    from actors.engines.sglang.engine import SglangEngine

    return SglangEngine(model, config, log_file, number=number)


def evaluation_engine(config: EngineConfig, model: Path) -> Engine:
    """Return an engine in this process for held-out prompts, which keeps one version while others go on."""
    from actors.engines.embedded.engine import EmbeddedEngine

    own = config if isinstance(config, EmbeddedEngineConfig) else EmbeddedEngineConfig()
    return EmbeddedEngine.from_directory(model, own)
