"""What a SGLang server of our own is started with: where its Python is, its settings and its environment.
SGLang checks its settings against each other. Settings that it would accept and a run would suffer from are
refused here."""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from actors.engines.sglang.in_server.sluice_changes import APPLY
from actors.engines.sglang.in_server.sluice_digests import EXPECT
from actors.engines.sglang.server.gpu_count import base_gpu_id, is_on, replicas, size
from actors.settings.engines import NOT_QUANTISED, SglangEngineConfig, SglangSetting
from bus.errors import ConfigError
from storage.model_files.output_head import has_other_head
from storage.model_files.packed_files import is_quantised_model

Settings = Mapping[str, SglangSetting]
OURS = (
    "model_path", "host", "port", "load_format", "weight_version", "nnodes", "node_rank", "dist_init_addr",
)  # fmt: skip
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
FP8_FROM, PACKED_FROM = (8, 9), (10, 0)
"""Compute capabilities from which GPUs multiply in fp8, and SGLang's kernels want the scales packed."""
FORCES_PACKING = "SGLANG_FORCE_FP8_MARLIN"
"""Variable that has SGLang pack fp8 weights as on GPUs that do not multiply in fp8."""
BUILT_HERE = Path(__file__).parents[4] / ".venv-sglang" / "bin" / "python"
"""Made by `make sglang`."""
NEEDS_CUDA = {
    "speculative_algorithm": "its kernels for drafts are missing in the build for CPUs",
    "enable_deterministic_inference": "there are batch-invariant kernels for accelerators only",
    "enable_dp_attention": "attention on a CPU cannot fill up the batches of its ranks",
    "attn_dp_size": "attention on a CPU cannot fill up the batches of its ranks",
}
"""Settings that a server on a CPU dies of, and why."""
KERNEL_CACHES = {
    "SGLANG_CACHE_DIR": "",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "nv",
    "FLASHINFER_WORKSPACE_BASE": "",
}
"""Variables by which a server and its libraries find what they compiled and tuned before, and the place of
each in one directory. From 0.5.19 on SGLang sets most of them so itself."""
LOSSY = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def interpreter(config: SglangEngineConfig) -> Path:
    """Return the Python that SGLang is installed in. Raises `ConfigError` when there is none."""
    if config.python is not None:
        if not config.python.is_file():
            raise ConfigError(f"actors.engine.python: there is no interpreter {config.python}")
        return config.python.absolute()
    spec = importlib.util.find_spec("sglang")
    if spec is not None and spec.origin is not None:  # without an origin `sglang` is some directory
        return Path(sys.executable)
    if BUILT_HERE.is_file():
        return BUILT_HERE
    raise ConfigError(
        f"SGLang is not installed for {sys.executable}: name the interpreter of the environment that has it "
        "with --actors.engine.python, or make one for this machine's CPU with `make sglang`"
    )


def chosen(config: SglangEngineConfig) -> dict[str, SglangSetting]:
    """Return the user's settings by SGLang's names. Raises `ConfigError` for those that the engine
    decides."""
    given = config.settings
    for name in OURS:
        if name in given:
            raise ConfigError(f"actors.engine.server.{name}={given[name]!r}: the engine sets this itself")
    return given


def device_of(given: Settings) -> str:
    """Which device a server with these settings uses."""
    return str(given.get("device", "cuda" if torch.cuda.is_available() else "cpu"))


def server_settings(
    config: SglangEngineConfig, model: Path, *, host: str, port: int, first_gpu: int, ranks_port: int = 0
) -> dict[str, SglangSetting]:
    """Return every setting of a server for the model in a directory, whose ranks meet at `ranks_port`; 0
    leaves that to SGLang. Raises `ConfigError` for settings that the engine decides or a run suffers from,
    and for a model without architectures. The `server` table of `config` has the last word."""
    given = chosen(config)
    device = device_of(given)
    refuse_unfit(config, given, device)
    if has_other_head(model):
        raise ConfigError(
            f"{model} has an output layer of its own, and its config.json ties it to the embedding, by which "
            "SGLang leaves it out: set tie_word_embeddings to false there"
        )
    if is_quantised_model(model):
        refuse_packing(given, device, {**os.environ, **config.environment}, model)
        refuse_wide(given.get("dtype", _dtype(model)), model)
    return {
        "skip_tokenizer_init": True,  # token ids in and out
        "log_level_http": "warning",  # a line for each request fills the log and says nothing
        "dtype": _dtype(model) or ("float32" if device == "cpu" else "bfloat16"),
        **(ON_CPU if device == "cpu" else {}),
        **({"enable_return_routed_experts": True} if config.routed_experts else {}),
        **(_streaming(config.stream_interval) if config.stream_interval else {}),
        **({"base_gpu_id": base_gpu_id(given, first_gpu)} if device == "cuda" else {}),
        **_alone(config, given, ranks_port),
        **added(given),
        **given,
        "model_path": str(model),
        "host": host,
        "port": port,
        "load_format": "dummy",
        "custom_weight_loader": (*_several(given.get("custom_weight_loader", ())), APPLY, EXPECT),
        "weight_version": "-1",
        **_nodes(config),
    }


def _alone(config: SglangEngineConfig, given: Settings, ranks_port: int) -> Settings:
    """Return what suits a server whose ranks all serve the same requests. One with nothing to do then sleeps
    until there is something, instead of looking all the time, for which it takes a core and its interpreter.
    Its ranks meet at a port that no other gets: until 0.5.22 SGLang draws an ephemeral one and uses it when
    all its packages are loaded."""
    if any(is_on(given.get(name)) for name in ("enable_dp_attention", "attn_dp_size")):
        return {}  # ranks wait for the one that sleeps
    has_own_port = ranks_port and config.nodes == 1 and replicas(given) == 1
    return {"sleep_on_idle": True} | ({"nccl_port": ranks_port} if has_own_port else {})


def _nodes(config: SglangEngineConfig) -> Settings:
    if config.nodes == 1:
        return {}
    return {"nnodes": config.nodes, "node_rank": config.node_rank, "dist_init_addr": config.rendezvous}


def server_environment(config: SglangEngineConfig, settings: Settings, python: Path) -> dict[str, str]:
    """Return this process's variables as a server needs them; those of the configuration have the last word.
    One is left out unless `python` is this process's own: PYTHONPATH names packages of its environment."""
    shared = python == Path(sys.executable)
    inherited = {name: value for name, value in os.environ.items() if shared or name != "PYTHONPATH"}
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"} if settings.get("device") == "cpu" else {}
    kept = config.kernel_cache.expanduser().absolute()
    caches = {name: str(kept / below) for name, below in KERNEL_CACHES.items()}
    return caches | inherited | {"HF_HUB_OFFLINE": "1"} | cpu | config.environment


def _streaming(interval: int) -> Settings:
    return {"stream_interval": interval, "incremental_streaming_output": True}


def _several(value: SglangSetting) -> tuple[int | float | str, ...]:
    return value if isinstance(value, tuple) else (value,)


def _dtype(model: Path) -> str:
    """Return what config.json says that the model computes in: SGLang's own choice for float32 would be
    float16."""
    config = json.loads((model / "config.json").read_text())
    if not config.get("architectures"):
        raise ConfigError(f"{model}/config.json names no architectures: SGLang cannot tell what to serve")
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def refuse_unfit(config: SglangEngineConfig, given: Settings, device: str) -> None:
    """Raise `ConfigError` for settings with which rollouts would be wrong or could not begin."""
    for name, reason in NEEDS_CUDA.items():
        if device == "cpu" and is_on(given.get(name)):
            raise _refusal(given, name, f"needs a GPU, this server is on the CPU: {reason}")
    if device == "cpu" and "fp8" in str(given.get("kv_cache_dtype")):
        raise _refusal(
            given, "kv_cache_dtype", "needs a GPU, this server is on the CPU: leave it out, or set bfloat16"
        )
    if not config.disaggregation.enabled and str(given.get("disaggregation_mode", "null")) != "null":
        raise _refusal(
            given,
            "disaggregation_mode",
            "is half of a pair: leave it out, and set actors.engine.disaggregation.enabled=true for both",
        )
    for name in LOSSY:
        if str(given.get(name, 1)) not in ("1", "1.0"):
            raise _refusal(
                given, name, "accepts what the model would not draw: log-probs would be of others. Set 1"
            )
    _check_replicas(config, given)


def refuse_packing(given: Settings, device: str, environment: Mapping[str, str], model: Path) -> None:
    """Raise `ConfigError` where SGLang would pack quantised weights for its kernels, and take no second
    version."""
    if device == "cpu":
        raise _packed(model, "on the CPU")
    if environment.get(FORCES_PACKING, "").lower() in ("1", "true", "yes", "y"):
        raise ConfigError(
            f"{FORCES_PACKING}={environment[FORCES_PACKING]}: SGLang packs the quantised weights of {model} "
            "as it loads them, and takes no second version: leave it out"
        )
    if not torch.cuda.is_available():
        return
    if torch.version.hip is not None:
        raise _packed(model, "on AMD's GPUs")
    capability = torch.cuda.get_device_capability()
    if capability < FP8_FROM:
        raise _packed(model, f"on GPUs of compute capability {'.'.join(map(str, capability))}, below 8.9,")
    for name in ("fp8_gemm_backend", "moe_runner_backend"):
        if capability >= PACKED_FROM and given.get(name) != "triton":
            raise ConfigError(
                f"SGLang packs the scales of the quantised weights of {model} on this GPU as it loads them, "
                f'and takes no second version: set actors.engine.server.{name}="triton", whose kernels take '
                "them as they are"
            )


def refuse_wide(dtype: object, model: Path) -> None:
    """Raise `ConfigError` for a type of activations that SGLang does not multiply with quantised weights."""
    if str(dtype).removeprefix("torch.") in ("float32", "float"):
        raise ConfigError(
            f"the weights of {model} are quantised, and SGLang computes with them in bfloat16 or float16, "
            f'not in {dtype}: set actors.engine.server.dtype="bfloat16"'
        )


def _packed(model: Path, where: str) -> ConfigError:
    return ConfigError(
        f"SGLang {where} packs the quantised weights of {model} as it loads them, and takes no second "
        f"version: give it another GPU, or weights that are not quantised: {NOT_QUANTISED}"
    )


def added(given: Settings) -> dict[str, SglangSetting]:
    """Return the settings that follow from the user's: a draft model is read from its files, the policy comes
    later. Where the server leaves its device, as with colocation, it keeps the draft: nobody sends that
    again."""
    if "speculative_draft_model_path" not in given:
        return {}
    leaves = is_on(given.get("enable_memory_saver"))
    return {
        "speculative_draft_load_format": "auto",
        **({"enable_draft_weights_cpu_backup": True} if leaves else {}),
    }


def _check_replicas(config: SglangEngineConfig, given: Settings) -> None:
    ranks = size(given, "tp_size", "tensor_parallel_size")
    copies = size(given, "dp_size", "data_parallel_size")
    if is_on(given.get("enable_dp_attention")) and (copies < 2 or ranks % copies):
        raise _refusal(
            given, "enable_dp_attention", f"divides tp_size={ranks} by dp_size={copies}: give a divisor"
        )
    if replicas(given) > 1 and config.update != "disk":
        raise _refusal(
            given,
            "dp_size",
            "has replicas in one server, which takes tensors for one only: set actors.fleet.engines instead, "
            "or actors.engine.update=disk",
        )


def _refusal(given: Settings, name: str, reason: str) -> ConfigError:
    return ConfigError(f"actors.engine.server.{name}={given.get(name)!r} {reason}")
