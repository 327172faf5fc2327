"""Attention of which all queries of a token are normed together, and all of its keys."""

from typing import Any

import torch
from torch import Tensor

from learner.backends.megatron.model.attention.attention import PackedLayout, PackedSelfAttention
from learner.backends.megatron.model.attention.norm import RMSNorm
from learner.backends.megatron.model.attention.qkv import heads_by_group


class JointlyNormedAttention(PackedSelfAttention):
    """A layer of a rank that has all heads: others would have to add up squares over ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width, config = self.hidden_size_per_attention_head, self.config
        self.q_layernorm = RMSNorm(config, config.num_attention_heads * width, config.layernorm_epsilon)
        self.k_layernorm = RMSNorm(config, config.num_query_groups * width, config.layernorm_epsilon)

    def heads(self, mixed: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [T, heads, d]."""
        heads = heads_by_group(mixed, self.head_settings)
        query, key, value = torch.split(heads, [heads.shape[2] - 2, 1, 1], dim=2)
        query = self.q_layernorm(query.flatten(1)).view(query.shape)
        key = self.k_layernorm(key.flatten(1)).view(key.shape)
        normed = torch.cat((query, key, value), dim=2).view(mixed.shape)
        return self.split_heads(normed, None, None, layout.rotations[self.rope], self.head_settings)
