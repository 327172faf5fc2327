"""The one adapter from a transformers configuration to megatron-core's GPT model."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from bus.errors import ConfigError
from learner.backends.megatron.conversion.base import SILU, Experts, Gate
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.core.ddp import finish_gathering
from learner.backends.megatron.core.layout import layers_of_last_stage, layout_problems, padded_vocabulary
from learner.backends.megatron.core.megatron_core import (
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    parallel_state,
    tensor_parallel,
)
from learner.backends.megatron.model.attention.attention import PackedLayout, pack_layout
from learner.backends.megatron.model.attention.context_attention import ContextRanks
from learner.backends.megatron.model.attention.rope import ropes_of
from learner.backends.megatron.model.layers import block_spec
from learner.backends.megatron.model.requirements import unsupported
from learner.backends.output.output_layer import TokenLoss
from learner.backends.output.policy_output import policy_output
from learner.backends.shared.given_experts import refuse_other_experts
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import MicroBatch
from learner.distributed.process_group import device

HeadPass = Callable[[MicroBatch, Tensor, PackedLayout, "PolicyModel"], None]
"""Takes a micro-batch, the hidden states [T, 1, H] behind the model's last layer without gradient, their
layout, and the model, and trains a head for the token after the next on them."""


class PolicyModel(GPTModel):  # type: ignore[misc]  # megatron-core is untyped
    """A piece of a GPT model whose output is the loss, or log-probabilities of trained tokens, not logits."""

    weight_prefix = ""
    """Begins the names of its weights in the whole model."""

    def __init__(
        self,
        config: TransformerConfig,
        layers: TransformerBlockSubmodules,
        hf_config: PretrainedConfig,
        stage: int | None,
    ) -> None:
        super().__init__(
            config,
            layers,
            vocab_size=padded_vocabulary(hf_config.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            position_embedding_type="none",  # PackedSelfAttention applies the rotary embedding
            vp_stage=stage,
        )
        family, latent = family_of(hf_config), shape_of(hf_config).latent
        self.ropes = ropes_of(hf_config, config.kv_channels if latent is None else latent.rotated, device())
        self.embedding_scale, self.sinks = family.embedding_scale, family.sinks
        self.has_states = family.delta is not None
        """Whether layers take a state from token to token."""
        self.real_vocab_size = hf_config.vocab_size
        self.is_exact = False
        """Whether the model computes in exact arithmetic (exact.py)."""
        mark_cut_weights(self)

    def forward(
        self, batch: MicroBatch, token_loss: TokenLoss | None = None, top: int = 0,
        head: HeadPass | None = None,
    ) -> tuple[Tensor, ...] | Tensor:  # fmt: skip
        """Return what `policy_output` does; a pipeline stage before the last returns hidden states instead.

        `batch` is this rank's share (learner/backends/megatron/sharding.py). A `head` is trained on the
        hidden states in passing."""
        layout = self._layout(batch)
        hidden = self._hidden(batch, layout)
        if not self.post_process:
            return hidden
        if head is not None:
            head(batch, hidden.detach(), layout, self)
        first_label, weight = self.output_weight()
        return policy_output(
            self.of_all_tokens(hidden), weight, batch, token_loss, top,
            first_label=first_label, largest_part=self.output_layer.output_size_per_partition,
            group=self.pg_collection.tp, exact=self.is_exact,
        )  # fmt: skip

    def logits(self, batch: MicroBatch) -> Tensor:
        """Return the [T, V] logits of every position, for evaluation and tests; of a whole model only."""
        _, weight = self.output_weight()
        hidden = self.of_all_tokens(self.hidden(batch))
        return F.linear(hidden if batch.tree is None else hidden[batch.tree.computed], weight)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the hidden states of the computed tokens behind the last layer of this stage, [T, 1, H]."""
        return self._hidden(batch, self._layout(batch))

    def _layout(self, batch: MicroBatch) -> PackedLayout:
        context = self.pg_collection.cp
        ranks = ContextRanks(context.size(), context.rank(), ring=self.config.cp_comm_type == "p2p")
        layout = pack_layout(
            batch, self.ropes, self.config.params_dtype, ranks, sinks=self.sinks, states=self.has_states
        )
        layout.experts = self._given_experts(batch)
        return layout

    def _hidden(self, batch: MicroBatch, layout: PackedLayout) -> Tensor:
        tokens = batch.tokens if batch.tree is None else batch.tokens[batch.tree.source]
        embedded = self.embedded(tokens) if self.pre_process else None
        return self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=layout)  # type: ignore[no-any-return]

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return [T, 1, H] of tokens [T], or this rank's share of them if ranks share hidden states."""
        embedded: Tensor = self.embedding(tokens[None], None)
        if torch.is_grad_enabled() and not embedded.requires_grad:
            embedded.requires_grad_()  # of a frozen embedding: recomputed layers have no gradient otherwise
        if self.embedding_scale is None:
            return embedded
        return embedded * torch.tensor(self.embedding_scale, dtype=embedded.dtype).item()

    def _given_experts(self, batch: MicroBatch) -> Tensor | None:
        if batch.experts is None:
            return None
        refuse_other_experts(
            batch.experts, layers=self.config.num_layers, per_token=self.config.moe_router_topk
        )
        experts = batch.experts if batch.tree is None else batch.experts[batch.tree.source]
        group = self.pg_collection.tp
        return experts.chunk(group.size())[group.rank()] if self.config.sequence_parallel else experts

    def of_all_tokens(self, hidden: Tensor) -> Tensor:
        """Return [T, H] of hidden states that tensor-parallel ranks share, [T / ranks, 1, H], or all have."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(hidden, group=group)[:, 0]  # type: ignore[no-any-return]
        return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)[:, 0]  # type: ignore[no-any-return]

    def output_weight(self) -> tuple[int, Tensor]:
        """Return this rank's rows of the output layer without padding, and the token of the first."""
        weight = self.output_layer.weight
        if weight is None:
            weight = self.shared_embedding_or_output_weight()
        else:
            finish_gathering(self.output_layer)
        first = self.pg_collection.tp.rank() * len(weight)
        real = self.real_vocab_size - first
        return first, weight[:real] if real < len(weight) else weight


def build_chunks(
    hf_config: PretrainedConfig, *, dtype: torch.dtype, parallel: ParallelConfig = UNDIVIDED,
    kind: type[PolicyModel] = PolicyModel,
) -> list[PolicyModel]:  # fmt: skip
    """Build this rank's part of the model, on its device, with weights not yet set; `kind` says what a piece
    has for its output.

    Returns one piece, or `virtual_pipeline` pieces, from the first layers to the last. Raises `ConfigError`
    with every hyperparameter of `hf_config` that cannot be represented, or that `parallel` does not divide.
    """
    if problems := unsupported(hf_config) or unsuitable(hf_config, dtype, parallel):
        raise ConfigError("cannot train this model:\n" + "\n".join(f"- {problem}" for problem in problems))
    config = transformer_config(hf_config, dtype, parallel)
    pieces = parallel.virtual_pipeline
    with shared_experts_unwarned():
        return [
            kind(config, block_spec(config, hf_config, stage), hf_config, stage).to(device())
            for stage in (range(pieces) if pieces > 1 else [None])
        ]


def unsuitable(hf_config: PretrainedConfig, dtype: torch.dtype, parallel: ParallelConfig) -> list[str]:
    """List, for people, why a supported model cannot be computed as `dtype` or divided as `parallel` says."""
    problems = layout_problems(parallel, shape_of(hf_config))
    if not problems and family_of(hf_config).sinks:
        problems = list(_problems_of_sinks(dtype, parallel))
    return problems


@contextmanager
def shared_experts_unwarned() -> Iterator[None]:
    """Silence what megatron-core says of its own shared expert, which does not pass what its MLP asks for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MLP requires ffn_hidden_size", DeprecationWarning)
        yield


def _problems_of_sinks(dtype: torch.dtype, parallel: ParallelConfig) -> Iterator[str]:
    if dtype == torch.float32 and device().type == "cuda":
        yield "attention with sinks has no kernel for float32 on a GPU: set model.dtype=bfloat16"
    if parallel.context > 1 and parallel.context_attention == "ring":
        yield (
            "learner.parallel.context_attention=ring does not have attention with sinks: set "
            "context_attention=gather"
        )


def transformer_config(
    hf_config: PretrainedConfig, dtype: torch.dtype, parallel: ParallelConfig
) -> TransformerConfig:
    family = family_of(hf_config)
    shape = family.shape(hf_config)
    experts, stages = shape.experts, parallel.pipeline
    uneven = layers_of_last_stage(shape.layers, stages) if shape.layers % stages else None
    return TransformerConfig(
        num_layers=shape.layers,
        num_layers_in_last_pipeline_stage=uneven,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim if shape.latent is None else shape.latent.value,
        softmax_scale=family.attention_scale,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        layernorm_zero_centered_gamma=family.centred_norms,
        add_bias_linear=family.biases,
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm,
        attention_output_gate=family.output_gate,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        bias_dropout_fusion=torch.cuda.is_available(),
        use_cpu_initialization=not torch.cuda.is_available(),
        calculate_per_token_loss=True,
        cuda_graph_scope=[],
        moe_layer_freq=list(experts.sparse_layers) if experts else [False] * hf_config.num_hidden_layers,
        **(_expert_settings(experts) if experts else {}),
        **_gate_settings(family.gate),
        **_parallel_settings(parallel),
    )


def _swish(x: Tensor, gain: float) -> Tensor:
    return x * torch.sigmoid(gain * x)


def _gate_settings(gate: Gate) -> dict[str, Any]:
    if gate.function == "gelu_tanh":
        function: Callable[[Tensor], Tensor] = partial(F.gelu, approximate="tanh")
    else:
        function = F.silu if gate.gain == 1.0 else partial(_swish, gain=gate.gain)
    return {
        "gated_linear_unit": True,
        "activation_func": function,
        # The fusion keeps the two halves for the backward pass, and neither silu(gate) nor a copy of up.
        "bias_activation_fusion": gate == SILU,
        "glu_linear_offset": gate.offset,
        "activation_func_clamp_value": gate.limit,
    }


def _expert_settings(experts: Experts) -> dict[str, Any]:
    """Route as transformers does, with logits in float32, without capacity limits or an auxiliary loss."""
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_topk": experts.per_token,
        "moe_shared_expert_intermediate_size": experts.shared,
        "moe_shared_expert_gate": experts.shared is not None and experts.shared_gate,
        "moe_router_pre_softmax": not experts.renormalize,
        "moe_router_score_function": experts.score,
        "moe_router_topk_scaling_factor": experts.scale,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }


def _parallel_settings(parallel: ParallelConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.sequence,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "cp_comm_type": {"gather": "all_gather", "ring": "p2p"}[parallel.context_attention],
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "variable_seq_lengths": parallel.pipeline > 1,  # packs differ in length
        "moe_token_dispatcher_type": "alltoall",  # the only dispatcher for which they may
    }
    if parallel.virtual_pipeline > 1:
        # One message at a time: two ranks would take one direction's for the other's in a batch of them.
        settings |= {
            "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    if parallel.recompute == "full":
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif parallel.recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return settings


def mark_cut_weights(model: torch.nn.Module) -> None:
    """Mark the dimension along which tensor-parallel ranks share a weight, like megatron's initialisation.

    Weights come from a file, so that initialisation never runs. The gradient norm and the conversion read it.

    Originally weights of experts count as experts' only where there is expert parallelism. Elsewhere their
    gradients are then not added up over tensor-parallel ranks that do not share each expert, and the
    optimizer's state has another form, so that a checkpoint cannot be resumed with another `expert`."""
    for module in model.modules():
        for kind, dimension in CUT_DIMENSIONS:
            if isinstance(module, kind) and module.weight is not None:
                tensor_parallel.layers.set_tensor_model_parallel_attributes(
                    module.weight, is_parallel=True, dim=dimension, stride=1
                )
                if getattr(module, "is_expert", False):
                    module.weight.allreduce = False
                    if module.bias is not None:
                        _mark_biased_expert(module)


def _mark_biased_expert(layer: Any) -> None:
    """Mark the bias of an expert's layer as that of an expert, whose tokens are this rank's alone.

    Ranks do not share an expert that has biases, so that one which counts as divided is divided among one.
    Otherwise the first tensor-parallel rank alone would add its gradient to the norm, and other ranks have
    others. Nor does what the layer returns need a sum over ranks: megatron-core would make one, and then add
    the bias in place, which autograd forbids."""
    layer.bias.allreduce = layer.bias.sequence_parallel = False
    if not getattr(layer.bias, "tensor_model_parallel", False):
        tensor_parallel.layers.set_tensor_model_parallel_attributes(layer.bias, True, 0, 1)
    layer.explicit_expert_comm = True


CUT_DIMENSIONS = (
    (tensor_parallel.VocabParallelEmbedding, 0),
    (tensor_parallel.ColumnParallelLinear, 0),
    (tensor_parallel.RowParallelLinear, 1),
)
"""Dimension of the weight along which tensor-parallel ranks share a layer."""
