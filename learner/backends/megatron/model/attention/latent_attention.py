"""Attention whose keys and values are made of one narrow vector a token (MLA, arXiv:2405.04434, section 2.1).

megatron-core's own module splits its rotary embedding by sequences as its self-attention does
(learner/backends/megatron/model/attention/attention.py), and cuts the projections to narrow vectors over
tensor-parallel ranks, which then gather them. Here each rank has these projections whole and computes them
for its own share of the tokens: ranks that share the weights of a model with experts share its tokens too."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.backends.megatron.conversion.base import LatentSizes
from learner.backends.megatron.core.megatron_core import (
    Attention,
    ProcessGroupCollection,
    TransformerConfig,
    tensor_parallel,
)
from learner.backends.megatron.model.attention.attention import PackedLayout, attended
from learner.backends.megatron.model.attention.norm import RMSNorm

EPS = 1e-6
"""Constant under the root of the norms of narrow vectors; transformers does not read it from anywhere."""


class WholeLinear(torch.nn.Module):
    """A linear layer without a bias that each tensor-parallel rank has whole, for its share of the tokens."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by megatron-core

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the product, and no bias, as layers of megatron-core do."""
        return F.linear(x, self.weight), None


class LatentAttention(Attention):  # type: ignore[misc]  # megatron-core is untyped
    """A layer of latent attention; `config.kv_channels` is the width of its values."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        *,
        sizes: LatentSizes,
        rope: int,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            config, submodules, layer_number, attention_type="self", pg_collection=pg_collection, **kwargs
        )
        self.sizes, self.rope = sizes, rope
        queries, hidden = sizes.plain + sizes.rotated, config.hidden_size
        if sizes.query_rank is None:
            self.linear_q_proj = self._of_heads(hidden, queries)
        else:
            self.linear_q_down_proj = WholeLinear(config, hidden, sizes.query_rank)
            self.q_layernorm = RMSNorm(config, sizes.query_rank, EPS)
            self.linear_q_up_proj = self._of_heads(sizes.query_rank, queries)
        self.linear_kv_down_proj = WholeLinear(config, hidden, sizes.rank + sizes.rotated)
        self.kv_layernorm = RMSNorm(config, sizes.rank, EPS)
        self.linear_kv_up_proj = self._of_heads(sizes.rank, sizes.plain + sizes.value)

    def _of_heads(self, inputs: int, width: int) -> Any:
        """Make a projection to vectors of this width, one a head, which tensor-parallel ranks share."""
        return tensor_parallel.ColumnParallelLinear(
            inputs, self.config.num_attention_heads * width, config=self.config,
            init_method=self.config.init_method, bias=False, gather_output=False,
            tp_group=self.pg_collection.tp,
        )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedLayout, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        layout = packed_seq_params
        query, key, value = self.get_query_key_value_tensors(hidden_states, layout.rotations[self.rope])
        return attended(self, query, key, value, layout)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, rotation: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, [T, heads, plain + rotated], and values, [T, heads, value]."""
        sizes = self.sizes
        both, _ = self.linear_kv_down_proj(hidden_states)
        narrow, turned_key = torch.split(both, [sizes.rank, sizes.rotated], -1)
        keys_and_values = self._heads(self.linear_kv_up_proj(self.kv_layernorm(narrow))[0])
        plain_key, value = torch.split(keys_and_values, [sizes.plain, sizes.value], -1)
        queries = self._heads(self._queries(hidden_states))
        plain_query, turned_query = torch.split(queries, [sizes.plain, sizes.rotated], -1)
        if self.config.sequence_parallel:  # every rank's heads need the keys of all tokens
            turned_key = tensor_parallel.gather_from_sequence_parallel_region(
                turned_key, group=self.pg_collection.tp
            )
        turned_query, turned_key = (
            rotated(x, rotation, interleaved=sizes.interleaved) for x in (turned_query, turned_key)
        )
        turned_key = turned_key.expand(-1, self.num_attention_heads_per_partition, -1)
        return torch.cat((plain_query, turned_query), -1), torch.cat((plain_key, turned_key), -1), value

    def _queries(self, hidden_states: Tensor) -> Tensor:
        if self.sizes.query_rank is None:
            return self.linear_q_proj(hidden_states)[0]  # type: ignore[no-any-return]
        narrow, _ = self.linear_q_down_proj(hidden_states)
        return self.linear_q_up_proj(self.q_layernorm(narrow))[0]  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        """View [T, 1, heads * d] as [T, heads, d]."""
        return x.view(len(x), self.num_attention_heads_per_partition, -1)


def rotated(x: Tensor, rotation: tuple[Tensor, ...], *, interleaved: bool) -> Tensor:
    """Turn [T, n, d] by the angles of each token; the result's halves are pairs.

    Args:
        x: pairs are neighbours where it is `interleaved`, else its halves.
        rotation: cosines and sines of a `PackedLayout`, twice [T, 1, d]."""
    half = x.shape[-1] // 2
    cos, sin = rotation[0][..., :half], rotation[1][..., half:]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
