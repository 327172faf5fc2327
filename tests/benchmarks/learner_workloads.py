"""Models and batches that the learner's steps are measured with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.model_shapes import SHAPES
from learner.data.balancing import FORWARD_AND_BACKWARD, forward_flops
from learner.data.packing import MicroBatch, Sample, pack

ModelConfig: TypeAlias = Qwen3Config | Qwen3MoeConfig | DeepseekV3Config


@dataclass(frozen=True)
class Workload:
    """A model and the shape of the batches it trains on."""

    model: PretrainedConfig
    dtype: torch.dtype
    sequence: int
    """Tokens of each sequence."""
    micro_batch: int
    """Tokens of each micro-batch."""
    micro_batches: int
    rounds: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens of one step."""
        return self.micro_batch * self.micro_batches

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens in the vocabulary."""
        return int(self.model.get_text_config().vocab_size)

    def samples(self) -> list[Sample]:
        """Random trajectories, all of whose tokens but the first are trained, as by the other sides."""
        rng = np.random.default_rng(0)
        mask = np.arange(self.sequence) > 0
        return [
            Sample(
                token_ids=rng.integers(0, self.vocab_size, self.sequence).astype(np.int32),
                loss_mask=mask,
                streams={
                    "behaviour_logprobs": -float(np.log(self.vocab_size)),
                    "policy_versions": 0,
                    "advantages": float(rng.normal()),
                },
            )
            for _ in range(self.tokens // self.sequence)
        ]

    def batches(self) -> list[MicroBatch]:
        """Return the micro-batches of a step."""
        return pack(self.samples(), self.micro_batch)

    def plain_inputs(self, batch: MicroBatch) -> Mapping[str, Tensor]:
        """Return what transformers' own model takes of a micro-batch, whose sequences are of one length."""
        tokens = batch.tokens.view(-1, self.sequence)
        return {"input_ids": tokens, "labels": tokens}

    def flops(self) -> float:
        """Return the FLOPs of one step, forward and backward without recomputation."""
        return (
            FORWARD_AND_BACKWARD * forward_flops(self.model, self.sequence) * (self.tokens // self.sequence)
        )


def weights(config: ModelConfig) -> float:
    """Count the weights that a token is multiplied with; the embedding counts once, as output layer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    active = 1.0
    if not isinstance(config, Qwen3Config):
        experts = config.num_experts if isinstance(config, Qwen3MoeConfig) else config.n_routed_experts
        active = config.num_experts_per_tok / experts
    layers = sum(
        weight.numel() * (active if ".experts." in name else 1.0)
        for name, weight in model.model.layers.named_parameters()
        if weight.dim() > 1
    )
    return float(layers + config.vocab_size * config.hidden_size)


def small() -> Workload:
    """Return what a laptop trains in a fraction of a second."""
    return Workload(qwen3(256, 768, 4, 8, 4, 32, 4096), torch.float32, 256, 2048, 2, rounds=7)


def qwen3_600m(*, tokens: int) -> Workload:
    """Qwen3-0.6B on 64k tokens a step, packed from sequences of 2k."""
    config = Qwen3Config(**SHAPES["qwen3-0.6b"], attn_implementation="sdpa", use_cache=False)
    return Workload(config, torch.bfloat16, 2048, tokens, 65536 // tokens, rounds=5)


def small_experts() -> Workload:
    """Return a Qwen3-MoE of 1.0 billion weights, of which a token meets 0.35, on 64k tokens a step."""
    config = Qwen3MoeConfig(
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        norm_topk_prob=True,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return Workload(config, torch.bfloat16, 2048, 16384, 4, rounds=5)


def small_latent() -> Workload:
    """Return a DeepSeek-V3 of 1.0 billion weights with its widths of heads, on 64k tokens a step."""
    config = DeepseekV3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=12,
        first_k_dense_replace=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=384,
        kv_lora_rank=256,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        moe_intermediate_size=512,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return Workload(config, torch.bfloat16, 2048, 16384, 4, rounds=5)


def qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, groups: int, head_dim: int, vocab: int
) -> Qwen3Config:
    """Return the shape of a model with tied embeddings."""
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
