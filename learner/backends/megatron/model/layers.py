"""Specifications of a model's layers: which modules they are made of."""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import Family, Shape
from learner.backends.megatron.conversion.families import family_of
from learner.backends.megatron.core.megatron_core import (
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from learner.backends.megatron.model.attention.attention import (
    GatedSelfAttention,
    JointlyNormedAttention,
    PackedAttention,
    PackedSelfAttention,
)
from learner.backends.megatron.model.attention.latent_attention import LatentAttention
from learner.backends.megatron.model.attention.norm import RMSNorm
from learner.backends.megatron.model.attention.rope import rope_numbers
from learner.backends.megatron.model.attention.windows import windows_of
from learner.backends.megatron.model.delta_net import GatedDeltaNet
from learner.backends.megatron.model.grouped_experts import GroupedExperts
from learner.backends.megatron.model.router_replay import ReplayedLayer


class OutputNormedLayer(TransformerLayer):  # type: ignore[misc]  # megatron-core is untyped
    """A layer that norms what attention and MLP return before it adds it to the hidden states."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.attention_output_norm = self._norming(self.self_attention)
        self.mlp_output_norm = self._norming(self.mlp)

    def _norming(self, module: torch.nn.Module) -> RMSNorm:
        norm = RMSNorm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)

        def normed(
            _module: torch.nn.Module, _inputs: object, output: tuple[Tensor, None]
        ) -> tuple[Tensor, None]:
            return norm(output[0]), output[1]

        module.register_forward_hook(normed)
        return norm


def block_spec(
    config: TransformerConfig, hf_config: PretrainedConfig, stage: int | None
) -> TransformerBlockSubmodules:
    """Return megatron-core's own layers, except for attention over packed sequences and the norms."""
    first = get_transformer_layer_offset(config, vp_stage=stage)
    here = slice(first, first + get_num_layers_to_build(config, vp_stage=stage))
    family = family_of(hf_config)
    shape = family.shape(hf_config)
    of_layers = zip(
        config.moe_layer_freq[here],
        windows_of(hf_config)[here],
        rope_numbers(hf_config)[here],
        shape.delta_layers[here],
        strict=True,
    )
    layers = []
    for sparse, window, rope, is_delta in of_layers:
        layer = _layer_spec(config, family, shape, sparse=sparse)
        if is_delta:
            layer.submodules.self_attention = ModuleSpec(GatedDeltaNet, params={"sizes": shape.delta})
        else:
            _let_attend(layer.submodules.self_attention, config, family, shape, window=window, rope=rope)
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def head_layer_spec(config: TransformerConfig, hf_config: PretrainedConfig) -> ModuleSpec:
    """Return the layer of a head for the token after the next, which is one of the model's sparse layers."""
    family = family_of(hf_config)
    shape = family.shape(hf_config)
    layer = _layer_spec(config, family, shape, sparse=True)
    _let_attend(layer.submodules.self_attention, config, family, shape, window=None, rope=0)
    return layer


def _layer_spec(config: TransformerConfig, family: Family, shape: Shape, *, sparse: bool) -> Any:
    experts = shape.experts if sparse else None
    num_experts = None if experts is None else experts.count
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    if family.output_norms:
        layer.module = OutputNormedLayer
    if experts is not None:
        layer.module = ReplayedLayer
        layer.params = {"experts": experts}
        layer.submodules.mlp.submodules.experts.module = GroupedExperts
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if experts is None:
        layer.submodules.mlp.params["ffn_hidden_size"] = config.ffn_hidden_size
    return layer


def _let_attend(
    spec: Any, config: TransformerConfig, family: Family, shape: Shape, *, window: int | None, rope: int
) -> None:
    spec.module = PackedSelfAttention
    spec.params["rope"] = rope
    if shape.latent is not None:
        spec.module = LatentAttention
        spec.params["sizes"] = shape.latent
    if family.joint_norms:
        spec.module = JointlyNormedAttention
    if family.output_gate:
        spec.module = GatedSelfAttention
        spec.params["pieces"] = family.rotation
    attention = spec.submodules
    attention.core_attention = ModuleSpec(
        module=PackedAttention, params={"window": window, "sinks": family.sinks}
    )
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
