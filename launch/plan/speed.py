"""Seconds of a step and of its rollouts, from figures measured on an H200 (docs/performance.md)."""

import math

from transformers import PretrainedConfig

from launch.plan.memory import Model
from launch.plan.sizes import is_mixture, kv_bytes, size
from learner.config.learner import LearnerConfig
from learner.data.balancing import FORWARD_AND_BACKWARD, forward_flops
from learner.metrics.gpus import Gpu

LARGE = 1_500_000_000
"""Parameters from which the figures of large models stand, and below which those of small ones."""
MFU = {
    ("megatron", "small"): 0.47,
    ("megatron", "large"): 0.54,
    ("megatron", "small mixture"): 0.24,
    ("megatron", "large mixture"): 0.35,
    ("fsdp", "small"): 0.35,
    ("fsdp", "large"): 0.40,
    ("fsdp", "small mixture"): 0.28,
    ("fsdp", "large mixture"): 0.28,
}
"""Measured share of a GPU's peak FLOPs by backend and kind of model, without recompute: a Qwen3-0.6B, the
shapes of 1.7B to 8B, a mixture of 1.0 billion weights, four layers of a 30B-A3B. Large models on FSDP are not
measured: the dense ones go by the ratio of the 0.6B, the mixture by the small one."""
RECOMPUTED = 0.80
"""Speed with full recompute, in units of that without: 0.80 of the 0.6B and of the 8B shape."""
LORA = 1.03
"""Speed of adapters of the 0.6B, in units of whole weights."""
SHARED = {"data": 0.96, "tensor": 0.5, "context": 0.43, "expert": 0.84}
"""Speed a GPU of two in units of one alone, by what they share. Layers of larger models lose less."""
PIPELINE = 0.84
"""The same of two stages, apart from the time that they idle while a pipeline fills and drains."""
DECODE_STEP_S = 0.006
"""Seconds of a step of SGLang besides reading weights and keys: 256 answers of a 0.6B grow by 38,200 tokens a
second (docs/performance.md)."""
BANDWIDTH = 0.6
"""Share of its bandwidth at which a GPU reads weights and keys; assumed, not measured."""


def mfu(model: Model, learner: LearnerConfig, ranks: int, micro_batches: int) -> float:
    """Return the share of the peak FLOPs that ranks of this layout reach, recomputed work not counted."""
    config, parallel = model.hf_config.get_text_config(), learner.parallel
    kind = "large" if model.parameters >= LARGE else "small"
    if is_mixture(config, model.layers - 1):
        kind += " mixture"
    found = MFU[learner.backend, kind]
    found *= RECOMPUTED if parallel.recompute == "full" else 1.0
    found *= LORA if learner.lora.exists else 1.0
    for name in ("tensor", "context", "expert"):
        found *= SHARED[name] if getattr(parallel, name) > 1 else 1.0
    if parallel.pipeline > 1:
        waiting = (parallel.pipeline - 1) / parallel.virtual_pipeline
        found *= PIPELINE * micro_batches / (micro_batches + waiting)
    if ranks > parallel.tensor * parallel.context * parallel.pipeline:
        found *= SHARED["data"]
    return found


def step_flops(hf_config: PretrainedConfig, sequences: int, tokens: int) -> float:
    """Return the FLOPs of a step on sequences of so many tokens, forward and backward, without recompute."""
    return FORWARD_AND_BACKWARD * forward_flops(hf_config, tokens) * sequences


def decode_tokens_per_s(model: Model, gpu: Gpu, gpus: int, requests: float, context: int) -> float:
    """Return the tokens a second of one engine on `gpus` of a host, at so many requests of a mean context.

    A step adds a token to each request. It reads the weights once, of a mixture all experts that some request
    chose, and all keys and values."""
    read = sum(one.elements * _chosen(model, one.sharing == "expert", requests) for one in model.weights)
    bytes_read = read * 2 + requests * context * kv_bytes(model.hf_config)
    return requests / (DECODE_STEP_S + bytes_read / (gpus * gpu.bytes_per_s * BANDWIDTH))


def _chosen(model: Model, is_expert: bool, requests: float) -> float:
    """Return the share of weights of this kind that a decoding step reads: an expert is not read where no
    request has chosen it."""
    config = model.hf_config.get_text_config()
    experts = size(config, "num_experts", "n_routed_experts", "num_local_experts")
    if not is_expert or not experts:
        return 1.0
    return 1 - math.pow(1 - size(config, "num_experts_per_tok") / experts, requests)
