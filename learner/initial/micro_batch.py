"""How many tokens a micro-batch has on a CPU where settings leave it open: as many as its memory is good for.

More tokens than some hundreds make a step on a CPU no faster, and each keeps activations of all layers."""

import os
from collections.abc import Mapping
from dataclasses import replace

import structlog
import torch

from bus.process.host_limits import memory_bytes
from learner.config.batch import DEFAULT_TOKENS
from learner.config.process_settings import LearnerSettings
from learner.model_directories.dtypes import compute_dtype
from learner.model_directories.model_directory import load_hf_config

log = structlog.get_logger()
SHARE = 32
"""Activations of a micro-batch take at most one part in so many of the memory of the host or container."""
LEAST_TOKENS = 256
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "num_key_value_heads",
    "num_experts_per_tok", "intermediate_size", "moe_intermediate_size",
)  # fmt: skip


def fitted(settings: LearnerSettings) -> LearnerSettings:
    """Return the settings with a number of tokens, if this is a CPU and the model has a directory of its own.

    The number follows from the model and the host alone, so that a resumed learner has the same one. Models
    made from nothing are small, and have that of a GPU."""
    batch = settings.learner.batch
    if torch.cuda.is_available() or batch.tokens_per_micro_batch or settings.model.path is None:
        return settings
    text = load_hf_config(settings.model_directory).get_text_config()
    sizes = {name: getattr(text, name, None) or 0 for name in SIZES}
    recompute = settings.learner.parallel.recompute == "full"
    each = activation_bytes(sizes, compute_dtype(settings.model).itemsize, recompute=recompute)
    most = memory_bytes() // SHARE // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    tokens = max(LEAST_TOKENS, min(DEFAULT_TOKENS, most // each))
    mib = {"activations_mib": tokens * each >> 20, "host_mib": memory_bytes() >> 20}
    log.info("micro_batch", tokens=tokens, **mib)
    fitting = batch.model_copy(update={"tokens_per_micro_batch": tokens})
    return replace(settings, learner=settings.learner.model_copy(update={"batch": fitting}))


def activation_bytes(sizes: Mapping[str, int], item_bytes: int, *, recompute: bool) -> int:
    """Return about how much memory one token takes between its forward and backward pass.

    Each layer of transformers, which FSDP trains, keeps its input, what its norms return, queries, keys and
    values before and after they are turned, what attention returns, and the two halves of the gated layer
    with their product; recomputed layers keep their input alone, but for the layer at work. Megatron's
    layers keep up to a third less."""
    hidden, layers, heads = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["num_attention_heads"]
    width = sizes.get("head_dim") or hidden // heads
    groups = sizes.get("num_key_value_heads") or heads
    experts = sizes.get("num_experts_per_tok", 0)
    gated = max(sizes.get("intermediate_size", 0), experts * sizes.get("moe_intermediate_size", 0))
    of_layer = 4 * (hidden + (heads + 2 * groups) * width + gated)
    return item_bytes * (hidden * layers + of_layer if recompute else of_layer * layers)
