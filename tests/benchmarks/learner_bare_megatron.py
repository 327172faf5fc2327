"""The loop that megatron-core's own parts make, for comparison: no packing of ours, no loss of ours."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config

from learner.backends.megatron.core.megatron_core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    MegatronModule,
    MegatronOptimizerConfig,
    PackedSeqParams,
    TransformerConfig,
    finalize_model_grads,
    get_forward_backward_func,
    get_gpt_layer_local_spec,
    get_megatron_optimizer,
    tensor_parallel,
)
from learner.data.packing import MicroBatch
from learner.distributed.process_group import device

LOSS_CHUNK = 4096
"""Rows of logits in float32 at a time."""


class _CoreAttention(MegatronModule):  # type: ignore[misc]  # megatron-core is untyped
    """The least that attends to packed sequences without Transformer Engine."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams,
        **__: Any,
    ) -> Tensor:
        """[T, heads, d] and twice [T, groups, d] to [T, heads * d]."""
        bounds, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        if query.is_cuda:
            each = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(each, 1) for x in (key, value))
            attended = varlen_attn(query, key, value, bounds, bounds, longest, longest, window_size=(-1, 0))
            return attended.flatten(1)  # type: ignore[union-attr]
        q, k, v = (x.view(-1, longest, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).reshape(len(query), -1)


class BareLoop:
    """GPTModel of the local spec, DDP, distributed optimizer, forward-backward function, cross-entropy."""

    def __init__(self, hf_config: Qwen3Config, dtype: torch.dtype, *, lr: float) -> None:
        if torch.cuda.is_available():
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        config = _config(hf_config, dtype)
        spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = _CoreAttention
        spec.submodules.mlp.params["ffn_hidden_size"] = config.ffn_hidden_size
        model = GPTModel(
            config,
            spec,
            vocab_size=hf_config.vocab_size,
            max_sequence_length=hf_config.max_position_embeddings,
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            position_embedding_type="rope",
        )
        config.finalize_model_grads_func = finalize_model_grads
        self._model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            model.to(device(), dtype),
        )
        with torch.no_grad():  # its shards are views of the parameters that must stay leaves
            self._optimizer = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=lr,
                    bf16=dtype == torch.bfloat16,
                    params_dtype=dtype,
                    use_distributed_optimizer=True,
                    clip_grad=1.0,
                ),
                [self._model],
            )

    def step(self, batches: Sequence[MicroBatch]) -> None:
        """Update once, on sequences of equal length."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(batches),
            model=[self._model],
            num_microbatches=len(batches),
            seq_length=len(batches[0].tokens),
            micro_batch_size=1,
        )
        self._optimizer.step()


def _config(hf_config: Qwen3Config, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=hf_config.head_dim,
        ffn_hidden_size=hf_config.intermediate_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        bias_activation_fusion=torch.cuda.is_available(),
        apply_rope_fusion=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        calculate_per_token_loss=True,
        cuda_graph_scope=[],
    )


def _forward(batches: Iterator[MicroBatch], model: DistributedDataParallel) -> tuple[object, object]:
    batch = next(batches)
    layout = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.lengths[0],
        max_seqlen_kv=batch.lengths[0],
    )
    logits = model(batch.tokens[None], batch.position_ids[None], None, packed_seq_params=layout)

    def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = torch.zeros((), device=output.device)
        for rows, labels in zip(
            torch.split(output[0], LOSS_CHUNK), torch.split(batch.labels, LOSS_CHUNK), strict=True
        ):
            total = total + checkpoint(_cross_entropy, rows, labels, use_reentrant=False)
        return (
            total,
            torch.tensor(len(batch.labels), dtype=torch.int, device=output.device),
            {"loss": total.detach()},
        )

    return logits, loss


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")
