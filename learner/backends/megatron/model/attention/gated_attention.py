"""Attention whose outputs are weighed by sigmoids of the hidden state, one for each channel of a head."""

from typing import Any

import torch
from torch import Tensor

from learner.backends.megatron.conversion.partial_rotation import halves_together
from learner.backends.megatron.model.attention.attention import PackedLayout, PackedSelfAttention, attended


class GatedSelfAttention(PackedSelfAttention):
    """A layer whose projection has behind each query its gate, in the order of queries' channels."""

    def __init__(self, *args: Any, pieces: int, **kwargs: Any) -> None:
        """`pieces` say the order of a head (learner/backends/megatron/conversion/partial_rotation.py)."""
        super().__init__(*args, **kwargs)
        self.pieces = pieces

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedLayout, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within each sequence: [T, 1, H] to the same and a bias, of which there is none."""
        mixed, gate = self._apart(self.projected(hidden_states))
        query, key, value = self.heads(mixed, packed_seq_params)
        return attended(self, query, key, value, packed_seq_params, gate=gate.sigmoid())

    def _apart(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of a projection without gates, [T, 1, n], and the gates, [T, heads, d], whose
        channels are in the order of values'."""
        tokens, width = len(mixed), self.hidden_size_per_attention_head
        heads = mixed.view(tokens, self.num_query_groups_per_partition, -1, width)
        queries, shared = torch.split(heads, [heads.shape[2] - 2, 2], dim=2)
        query, gate = queries.view(tokens, len(heads[0]), -1, 2, width).unbind(3)
        ordered = halves_together(gate.flatten(1, 2), 2, self.pieces)
        return torch.cat((query, shared), dim=2).view(tokens, 1, -1), ordered.reshape(tokens, -1, width)
