"""What a server of SGLang is started with so that the learner can compute as it does (model.numerics=sglang).
In its deterministic mode sums of a row do not depend on the rest of a batch. `rl_on_policy_target` besides
replaces fused functions by those of torch, with a float32 residual stream."""

from collections.abc import Iterator, Mapping

from actors.settings.engines import EngineConfig, SglangEngineConfig, SglangSetting
from bus.errors import ConfigError

SERVER: Mapping[str, SglangSetting] = {
    "enable_deterministic_inference": True,
    "rl_on_policy_target": "fsdp",
    "attention_backend": "triton",
}
"""The learner's attention is that backend's: it needs no kernels besides Triton's."""
UNSCALED = "SGLANG_RETURN_ORIGINAL_LOGPROB"
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    UNSCALED: "1",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0",
    "SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE": "256",
}
"""Rotary embeddings by torch's functions one after the other, since a compiler may join two roundings;
log-probs in float32 of the logits as they are, where the mode itself rounds them to bfloat16; products by
Triton, of which there are two kinds otherwise; and the parts of a sum that the learner's attention has."""
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "prefill_attention_backend": ("triton",),
    "decode_attention_backend": ("triton",),
    "dtype": ("bfloat16", "auto"),
    "kv_cache_dtype": ("bfloat16", "bf16", "auto"),
    "device": ("cuda",),
    "tp_size": ("1",),
    "tensor_parallel_size": ("1",),
    "pp_size": ("1",),
    "pipeline_parallel_size": ("1",),
    "model_impl": ("sglang", "auto"),
    "json_model_override_args": ("{}",),
}
"""Values, by name, that change no result."""
CHANGES_RESULTS = (
    "quantization", "torchao_config", "speculative_algorithm", "enable_torch_compile", "enable_fp32_lm_head",
    "enable_lora", "enable_dp_attention", "disable_overlap_schedule", "disable_radix_cache",
    "enable_mixed_chunk",
)  # fmt: skip
"""Settings with which the server computes otherwise: the last three, sampled tokens that it then reads as a
part of a prompt."""


def tells_unscaled_logprobs(engine: EngineConfig) -> bool:
    """Return whether log-probs are those at temperature 1, whatever temperature tokens are drawn at."""
    return engine.servers.environment.get(UNSCALED) == "1"


def unlike_learner(engine: EngineConfig) -> Iterator[str]:
    """Yield why an engine would not compute as the learner does with model.numerics=sglang."""
    if engine.in_process:
        yield f"actors.engine.type={engine.type}: set it to sglang"
        return
    servers = engine.servers
    if engine.attached:
        yield (
            f"actors.engine.url={engine.attached[0]}: a running server has settings of its own; leave it "
            "out, so that servers start with the right ones"
        )
    if servers.disaggregation.enabled:
        yield "actors.engine.disaggregation.enabled=true: was never compared; set it to false"
    for name, wanted in ENVIRONMENT.items():
        if (value := servers.environment.get(name, wanted)) != wanted:
            yield f"actors.engine.environment.{name}={value!r}: set {wanted!r}, or leave it out"
    yield from _other_results(servers.settings)


def _other_results(settings: Mapping[str, SglangSetting]) -> Iterator[str]:
    for name, wanted in SERVER.items():
        if (given := settings.get(name, wanted)) not in (wanted, str(wanted).lower()):
            yield f"actors.engine.server.{name}={given!r}: set {str(wanted).lower()!r}, or leave it out"
    for name, allowed in ALLOWED.items():
        if (given := settings.get(name, allowed[0])) not in allowed and str(given) not in allowed:
            yield f"actors.engine.server.{name}={given!r}: set {allowed[0]!r}, or leave it out"
    for name in CHANGES_RESULTS:
        if str(given := settings.get(name, False)).lower() not in ("false", "none"):
            yield f"actors.engine.server.{name}={given!r}: it computes otherwise; leave it out"


def on_policy(engine: EngineConfig) -> SglangEngineConfig:
    """Return the engine's settings with those that let the learner compute as its server does. Raises
    `ConfigError` with all settings that contradict them."""
    if problems := list(unlike_learner(engine)):
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ConfigError(f"this actor's settings do not go with the run's model.numerics=sglang:\n{listed}")
    servers = engine.servers
    update = {"server": {**servers.settings, **SERVER}, "environment": {**servers.environment, **ENVIRONMENT}}
    return servers.model_copy(update=update)
