"""What a SGLang server of our own is started with: where its Python is, its settings and its environment."""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from actors.config import SglangEngineConfig, SglangSetting
from actors.engines.sglang.changes import APPLY
from actors.engines.sglang.features import added, refuse_unfit, replicas, size
from bus.errors import ConfigError

Settings = Mapping[str, SglangSetting]

OURS = ("model_path", "host", "port", "load_format", "weight_version")
"""Settings that the engine decides."""
ON_CPU: Settings = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 65536,
    "max_running_requests": 64,
    "mem_fraction_static": 0.2,
}
"""What runs on any CPU, without SGLang's own kernels."""
BUILT_HERE = Path(__file__).parents[3] / ".venv-sglang" / "bin" / "python"
"""Made by `make sglang`."""


def interpreter(config: SglangEngineConfig) -> Path:
    """The Python that SGLang is installed in. Raises `ConfigError` when there is none."""
    if config.python is not None:
        if not config.python.is_file():
            raise ConfigError(f"actors.engine.python: there is no interpreter {config.python}")
        return config.python.absolute()
    if importlib.util.find_spec("sglang") is not None:
        return Path(sys.executable)
    if BUILT_HERE.is_file():
        return BUILT_HERE
    raise ConfigError(
        f"SGLang is not installed for {sys.executable}: name the interpreter of the environment that has it "
        "with --actors.engine.python, or make one for this machine's CPU with `make sglang`"
    )


def chosen(config: SglangEngineConfig) -> dict[str, SglangSetting]:
    """The user's settings by SGLang's names. Raises `ConfigError` for those that the engine decides."""
    given = config.settings
    for name in OURS:
        if name in given:
            raise ConfigError(f"actors.engine.server.{name}={given[name]!r}: the engine sets this itself")
    return given


def device_of(given: Settings) -> str:
    """Which device a server with these settings uses."""
    return str(given.get("device", "cuda" if torch.cuda.is_available() else "cpu"))


def base_gpu_id(given: Settings, number: int) -> int:
    """The first GPU of one of several engines of a process: each takes as many as its parallel sizes say.

    Args:
        given: the user's settings by SGLang's names.
        number: which engine, from 0.

    Raises `ConfigError` for a size that is no number."""
    if given.get("base_gpu_id") is not None:
        return size(given, "base_gpu_id")
    return number * gpus(given)


def gpus(given: Settings) -> int:
    """How many a server uses. Raises `ConfigError` for a size that is no number."""
    found = replicas(given)
    for name, longer in (("tp_size", "tensor_parallel_size"), ("pp_size", "pipeline_parallel_size")):
        found *= size(given, name, longer)
    return found


def server_settings(
    config: SglangEngineConfig, model: Path, *, host: str, port: int, number: int
) -> dict[str, SglangSetting]:
    """Every setting of a server for the model in a directory.

    Args:
        config: the engine's settings; its `server` table has the last word.
        model: a directory with config.json; weights come later, it starts with arbitrary ones.
        host: address to listen on.
        port: where to listen.
        number: of the engine in its process, from 0; on CUDA each has GPUs of its own.

    Raises `ConfigError` for settings that the engine decides or a run suffers from, and for a model without
    architectures."""
    given = chosen(config)
    device = device_of(given)
    refuse_unfit(config, given, device)
    return {
        "skip_tokenizer_init": True,  # token ids in and out
        "dtype": _dtype(model) or ("float32" if device == "cpu" else "bfloat16"),
        **(ON_CPU if device == "cpu" else {}),
        **({"enable_return_routed_experts": True} if config.routed_experts else {}),
        **(_streaming(config.stream_interval) if config.stream_interval else {}),
        **({"base_gpu_id": base_gpu_id(given, number)} if device == "cuda" else {}),
        **added(given),
        **given,
        "model_path": str(model),
        "host": host,
        "port": port,
        "load_format": "dummy",
        "custom_weight_loader": (*_several(given.get("custom_weight_loader", ())), APPLY),
        "weight_version": "-1",
    }


def server_environment(config: SglangEngineConfig, settings: Settings, python: Path) -> dict[str, str]:
    """This process's variables as a server needs them; those of the configuration have the last word.

    One is left out unless `python` is this process's own: PYTHONPATH names packages of its environment."""
    shared = python == Path(sys.executable)
    inherited = {name: value for name, value in os.environ.items() if shared or name != "PYTHONPATH"}
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"} if settings.get("device") == "cpu" else {}
    return inherited | {"HF_HUB_OFFLINE": "1"} | cpu | config.environment


def _streaming(interval: int) -> Settings:
    return {"stream_interval": interval, "incremental_streaming_output": True}


def _several(value: SglangSetting) -> tuple[int | float | str, ...]:
    return value if isinstance(value, tuple) else (value,)


def _dtype(model: Path) -> str:
    """What its config says that the model computes in: SGLang's own choice for float32 would be float16."""
    config = json.loads((model / "config.json").read_text())
    if not config.get("architectures"):
        raise ConfigError(f"{model}/config.json names no architectures: SGLang cannot tell what to serve")
    return str(config.get("dtype") or config.get("torch_dtype") or "")
