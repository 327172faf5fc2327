"""The SGLang server that a benchmark starts."""

from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError
from launch.settings.run_config import ActorsProcess, flags, validate


def server_to_measure(model: str, settings: ActorsProcess) -> SglangEngineConfig:
    """Return the settings of an SGLang server for a model of random weights, under what flags give.

    Raises `ConfigError` for an unknown shape, for another engine and for several servers."""
    from benchmarks.random_models import refuse_several, shape  # they load torch

    shape(model)
    engine = validate({"actors": {"engine": {"type": "sglang"}}}, flags(settings)).actors.engine
    if engine.type != "sglang":
        raise ConfigError(f"--actors.engine.type {engine.type}: this command measures an SGLang server")
    refuse_several(engine)
    return engine
