"""Qwen3 of transformers, computed as SGLang's server computes it for `rl_on_policy_target="fsdp"`.

There the residual stream and the weights of norms are float32, products and attention bfloat16. Between the
kernels stand functions of single numbers, which torch computes alike in both processes."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from bus.errors import ConfigError
from learner.backends.fsdp.attention import PackedSequences
from learner.backends.sglang_kernels.functions import linear, normed, rotary_angles, rotated
from learner.backends.sglang_kernels.kernels import Decoded, SglangKernels, decoded_tokens
from learner.backends.shared.packed_attention import (
    bucketed_attention,
    causal_attention,
    causal_varlen_attention,
    has_varlen_kernel,
)
from learner.data.packing import MicroBatch
from storage.exact_arithmetic.functions import with_gradient
from storage.model_files.families import families_with, family_named


class SglangArithmetic:
    """Computes the hidden states of a model with a server's kernels."""

    def __init__(self, hf_model: PreTrainedModel, kernels: SglangKernels) -> None:
        """Have the layers of a model compute so where `hidden` calls them. Raises `ConfigError` for models of
        which SGLang computes otherwise."""
        refuse_other_models(hf_model.config)
        self.kernels = kernels
        self._config = hf_model.config
        for layer in hf_model.get_decoder().layers:
            layer.forward = partial(self._or_ordinary, layer, layer.forward)

    def hidden(self, hf_model: PreTrainedModel, batch: MicroBatch, packed: PackedSequences) -> Tensor:
        """Return what the output layer multiplies, bfloat16 [T, H]."""
        decoder: Any = hf_model.get_decoder()
        config = self._config
        heads = config.num_attention_heads * config.head_dim
        sampled_next = batch.loss_mask
        if (untrained := batch.streams.get("sampled_untrained")) is not None:
            sampled_next = sampled_next | untrained
        decoded = decoded_tokens(sampled_next, batch.position_ids, packed.longest, heads)
        angles = rotary_angles(config.rope_parameters["rope_theta"], config.head_dim, batch.position_ids)
        x = F.embedding(batch.tokens, decoder.embed_tokens.weight).float()
        for layer in decoder.layers:
            x = layer(x, sglang=(packed, decoded, angles))
        return normed(self.kernels, x, decoder.norm.weight, config.rms_norm_eps).bfloat16()

    def _or_ordinary(self, layer: Any, ordinary: Any, x: Tensor, *, sglang: Any = None, **others: Any) -> Any:
        """Be the forward pass of a layer: transformers' own where it is called by transformers' model."""
        return ordinary(x, **others) if sglang is None else self._layer(layer, x, *sglang)

    def _layer(
        self, layer: Any, x: Tensor, packed: PackedSequences, decoded: list[Decoded],
        angles: tuple[Tensor, Tensor],
    ) -> Tensor:  # fmt: skip
        """Return the float32 residual stream [T, H] behind a layer."""
        kernels, eps = self.kernels, self._config.rms_norm_eps
        attending = normed(kernels, x, layer.input_layernorm.weight, eps).bfloat16()
        x = x + self._attended(layer.self_attn, attending, packed, decoded, angles).float()
        expanding = normed(kernels, x, layer.post_attention_layernorm.weight, eps).bfloat16()
        mlp = layer.mlp
        gate, up = (linear(kernels, expanding, each.weight) for each in (mlp.gate_proj, mlp.up_proj))
        return x + linear(kernels, F.silu(gate) * up, mlp.down_proj.weight).float()

    def _attended(
        self, module: Any, x: Tensor, packed: PackedSequences, decoded: list[Decoded],
        angles: tuple[Tensor, Tensor],
    ) -> Tensor:  # fmt: skip
        kernels, width = self.kernels, module.head_dim
        query, key, value = (
            linear(kernels, x, each.weight).view(len(x), -1, width)
            for each in (module.q_proj, module.k_proj, module.v_proj)
        )
        norms = ((query, module.q_norm), (key, module.k_norm))
        query, key = (
            rotated(normed(kernels, each, norm.weight, norm.variance_epsilon), angles).bfloat16()
            for each, norm in norms
        )
        found = attention(kernels, query, key, value, packed, decoded, module.scaling)
        return linear(kernels, found.flatten(1), module.o_proj.weight)


def attention(
    kernels: SglangKernels, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences,
    decoded: Sequence[Decoded], scale: float,
) -> Tensor:  # fmt: skip
    """Attend within each sequence: [T, heads, d] to [T, groups, d], with the kernel for prompts or that for
    the tokens that were `decoded`."""
    starts, longest = packed.cu_seqlens, packed.longest

    def of_server(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = kernels.prefill(query, key, value, starts, longest, scale)
        for tokens in decoded:
            attended[tokens.rows] = kernels.decode(query, key, value, tokens, longest, scale)
        return attended

    def ordinary(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if has_varlen_kernel(query.device, query.dtype):
            return causal_varlen_attention(query, key, value, starts, starts, longest, longest, scale=scale)
        attend = partial(causal_attention, scale=scale)
        return bucketed_attention(query, key, value, packed.buckets, packed.slots, attend)

    given = (x.contiguous() for x in (query, key, value))
    return with_gradient(of_server, ordinary, *given)  # type: ignore[no-any-return]


def refuse_other_models(config: PretrainedConfig) -> None:
    """Raise `ConfigError` for models of which SGLang does not compute what is computed here."""
    problems = []
    if not family_named(config.model_type).sglang_numerics:
        known = " or ".join(families_with(lambda family: family.sglang_numerics))
        problems.append(f"model_type={config.model_type!r} is not {known}")
    else:
        if (kind := config.rope_parameters.get("rope_type", "default")) != "default":
            problems.append(f"rope_type={kind!r} is not default")
        if config.attention_bias:
            problems.append("attention_bias=True")
        if "sliding_attention" in config.layer_types:
            problems.append("it has sliding windows")
    if problems:
        raise ConfigError(
            "model.numerics=sglang is for the dense models for which SGLang has rl_on_policy_target, and "
            f"this is another: {'; '.join(problems)}. Set model.numerics=fast"
        )


def refuse_other_dtype(dtype: torch.dtype) -> None:
    """Raise `ConfigError` for a learner in another dtype than the server's."""
    if dtype != torch.bfloat16:
        raise ConfigError(f"model.numerics=sglang with model.dtype={dtype}: set model.dtype=bfloat16")
