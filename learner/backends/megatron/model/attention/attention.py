"""Causal self-attention over packed sequences of different lengths, rotary embedding included.

megatron-core's own path for packed sequences needs Transformer Engine, splits the rotary embedding into one
call per sequence, and does not restart positions when `max_seqlen` happens to equal the number of tokens.
Here everything that depends on the lengths is computed once per micro-batch, in a `PackedLayout` that
travels in the place of megatron-core's `PackedSeqParams`.

Ranks that share the tokens of each sequence (context parallelism) hold them zig-zag, as
learner/backends/megatron/sharding.py cuts them; each gathers all keys and values, or has those of one rank
after another, and attends from its own queries."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from learner.backends.megatron.conversion.partial_rotation import halves_together
from learner.backends.megatron.core.megatron_core import (
    Attention,
    MegatronModule,
    PackedSeqParams,
    ProcessGroupCollection,
    SelfAttention,
    TransformerConfig,
    make_sharded_tensors_for_checkpoint,
    tensor_parallel,
)
from learner.backends.megatron.model.attention.context_attention import (
    ALONE,
    ContextLayout,
    ContextRanks,
    attend_to_gathered,
    context_layout,
    gathered,
)
from learner.backends.megatron.model.attention.key_sets import KeySets, key_sets
from learner.backends.megatron.model.attention.norm import RMSNorm
from learner.backends.megatron.model.attention.qkv import HeadSettings, heads_by_group, split_heads
from learner.backends.megatron.model.attention.ring_attention import attend_around
from learner.backends.megatron.model.attention.ring_layout import RingLayout
from learner.backends.megatron.model.attention.rope import Rope
from learner.backends.megatron.model.attention.sink_attention import attend_with_sinks
from learner.backends.megatron.model.attention.state_layout import StateLayout, buckets_of, state_layouts
from learner.backends.megatron.model.attention.tree_attention import (
    TreeLayout,
    attend_along_paths,
    tree_layout,
)
from learner.backends.megatron.model.attention.windows import (
    refuse_shared_sinks,
    refuse_shared_states,
    refuse_shared_window,
)
from learner.backends.shared.packed_attention import (
    LengthBucket,
    bucketed_attention,
    causal_attention,
    causal_varlen_attention,
    has_varlen_kernel,
    of_one_width,
)
from learner.data.packing import MicroBatch


@dataclass
class PackedLayout(PackedSeqParams):  # type: ignore[misc]  # megatron-core is untyped
    """Lengths of the sequences in a pack, with everything that each layer needs to know about them."""

    rotations: tuple[tuple[Tensor, ...], ...] = ()
    """Cosine and sine of the rotary angle of each token, twice [T, 1, d], for `split_heads`; layers have one
    of these."""
    buckets: tuple[LengthBucket, ...] = ()
    """Sequences by length, longest first; empty if the attention kernel takes any lengths."""
    slots: Tensor | None = None
    """int64 [T], place of each token in the padded buckets laid end to end; `None` means the same place."""
    context: ContextLayout | None = None
    """Keys of all ranks that this rank's queries see; `None` if the rank holds whole sequences."""
    ring: RingLayout | None = None
    """Takes the place of `context` where keys and values pass by instead of being gathered."""
    parts: "tuple[tuple[int, PackedLayout], ...]" = ()
    """Numbers of tokens that lie end to end, each with what attention needs to know of them; empty where it
    is the same for all tokens."""
    sets: KeySets | None = None
    """The sequences as runs, where layers have sinks; `None` if they have none, or ranks share sequences."""
    tree: TreeLayout | None = None
    """Segments that each query sees, where sequences share them; `None` if they share nothing."""
    states: tuple[StateLayout, ...] = ()
    """The same tokens for layers that take a state from token to token; empty where no layer does."""
    experts: Tensor | None = None
    """int [T, layers, k], the experts that each token of this rank goes to
    (learner/backends/megatron/model/router_replay.py); `None` if routers choose."""


def pack_layout(
    batch: MicroBatch, ropes: Sequence[Rope], dtype: torch.dtype, context: ContextRanks = ALONE, *,
    sinks: bool = False, states: bool = False,
) -> PackedLayout:  # fmt: skip
    """Precompute what attention needs, once per micro-batch. Raises `ConfigError` for such layers and
    sequences that share prefixes."""
    tree, bounds = batch.tree, batch.cu_seqlens
    if tree is not None:
        layout = _of_lengths(bounds, batch.lengths)
        layout.tree = tree_layout(tree.lengths, tree.parents, tree.held, ranks=context.ranks).to(
            bounds.device
        )
    elif batch.cut is None:
        layout = _sequences_layout(bounds, batch.lengths, dtype, context, sinks=sinks)
    else:
        layout = _of_lengths(bounds, batch.cut + batch.whole)
        layout.parts = tuple(
            (sum(lengths) // ranks.ranks, _sequences_layout(bounds, lengths, dtype, ranks, sinks=sinks))
            for lengths, ranks in ((batch.cut, context), (batch.whole, ALONE))
            if lengths
        )
    positions = batch.position_ids if tree is None else batch.position_ids[tree.source]
    layout.rotations = tuple(rope.rotation(positions, dtype) for rope in ropes)
    if states:
        refuse_shared_states(tree is not None)
        layout.states = state_layouts(batch, context, bounds.device)
    return layout


def _of_lengths(bounds: Tensor, lengths: Sequence[int]) -> PackedLayout:
    return PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def _sequences_layout(
    bounds: Tensor, lengths: Sequence[int], dtype: torch.dtype, context: ContextRanks, *, sinks: bool
) -> PackedLayout:
    """Lay out sequences that are cut over these ranks, or whole ones; only for these `bounds` count."""
    layout, device = _of_lengths(bounds, lengths), bounds.device
    by_length = not has_varlen_kernel(device, dtype)
    ranks, rank = context.ranks, context.rank
    if ranks > 1 and context.ring:
        layout.ring = RingLayout(lengths, ranks=ranks, rank=rank, device=device)
    elif ranks > 1:
        layout.context = context_layout(lengths, ranks=ranks, rank=rank, by_length=by_length).to(device)
    elif sinks:
        layout.sets = key_sets(lengths, lengths, causal=True).to(device)
    elif by_length or len(set(lengths)) == 1:
        layout.buckets, layout.slots = buckets_of(lengths, device)
    return layout


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]  # megatron-core is untyped
    """Megatron-core's layer, with queries, keys and values made in one pass instead of a dozen."""

    split_heads = staticmethod(split_heads)

    def __init__(self, *args: Any, rope: int = 0, **kwargs: Any) -> None:
        """`rope` is the number of this layer's rotary embedding."""
        super().__init__(*args, **kwargs)
        self.rope = rope

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedLayout, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within each sequence: [T, 1, H] to the same and a bias, of which there is none."""
        query, key, value = self.heads(self.projected(hidden_states), packed_seq_params)
        return attended(self, query, key, value, packed_seq_params)

    def projected(self, hidden_states: Tensor) -> Tensor:
        """Return what this rank's heads are made of, [T, 1, n]."""
        mixed, _bias = self.linear_qkv(hidden_states)
        return self._of_shared_group(mixed) if self.config.num_query_groups < self.world_size else mixed

    def heads(self, mixed: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [T, heads, d]."""
        normed = self.config.qk_layernorm
        return self.split_heads(
            mixed,
            self.q_layernorm.factors if normed else None,
            self.k_layernorm.factors if normed else None,
            layout.rotations[self.rope],
            self.head_settings,
        )

    @property
    def head_settings(self) -> HeadSettings:
        return HeadSettings(
            groups=self.num_query_groups_per_partition,
            width=self.hidden_size_per_attention_head,
            eps=self.config.layernorm_epsilon,
        )

    def _of_shared_group(self, mixed: Tensor) -> Tensor:
        """Return this rank's queries, and the key and the value that it shares with other tensor ranks.

        There are more ranks than key-value heads. As in megatron-core, the rows of each group are cut evenly
        over the ranks that share it, so that no rank has a head by itself, and every rank gathers all
        outputs; the gradient of a key is the sum of those of all ranks that attend to it."""
        width, group = self.hidden_size_per_attention_head, self.pg_collection.tp
        sharing = self.world_size // self.config.num_query_groups
        number, place = divmod(group.rank(), sharing)
        every = tensor_parallel.mappings.all_gather_last_dim_from_tensor_parallel_region(mixed, group)
        of_group = every.chunk(self.config.num_query_groups, dim=-1)[number]
        queries, shared = of_group.split([of_group.shape[-1] - 2 * width, 2 * width], dim=-1)
        return torch.cat((queries.chunk(sharing, dim=-1)[place], shared), dim=-1)


def attended(
    layer: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return what a layer makes of its queries, keys and values [T, heads, d]: [T, 1, H], and no bias.
    `gate`, in the shape of values, weighs what the heads found."""
    recomputed = layer.checkpoint_core_attention and layer.training
    attend = layer._checkpointed_attention_forward if recomputed else layer.core_attention
    found = attend(query, key, value, None, packed_seq_params=layout)
    if gate is not None:
        found = found * gate
    return layer.linear_proj(found.flatten(1)[:, None])  # type: ignore[no-any-return]


class PackedAttention(MegatronModule):  # type: ignore[misc]  # megatron-core is untyped
    """Core attention of all layers; values may be of another width than queries and keys."""

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        window: int | None = None,
        sinks: bool = False,
        **_: Any,
    ) -> None:
        """Let each query see the last `window` tokens, its own included; None is all before it. With `sinks`,
        each head has one."""
        super().__init__(config=config)
        self.window = window
        self.attend: Callable[..., Tensor] | None = None
        """Causal attention in the place of the ordinary one."""
        self.sinks: torch.nn.Parameter | None = None
        if sinks:
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            tensor_parallel.set_tensor_model_parallel_attributes(
                self.sinks, is_parallel=True, dim=0, stride=1
            )
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.context_group, self.tensor_group = pg_collection.cp, pg_collection.tp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedLayout,
        **_: Any,
    ) -> Tensor:
        """Attend within each sequence: [T, heads, d], [T, groups, d] and [T, groups, v] to [T, heads, v].

        Raises `ConfigError` for sequences that share a prefix and are longer than the window, or have
        sinks."""
        layout, width = packed_seq_params, value.shape[-1]
        if layout.parts:
            sizes = [tokens for tokens, _ in layout.parts]
            heads = zip(*(torch.split(x, sizes) for x in (query, key, value)), strict=True)
            return torch.cat([
                self(*each, None, packed_seq_params=part)
                for each, (_, part) in zip(heads, layout.parts, strict=True)
            ])  # fmt: skip
        if layout.tree is not None:
            refuse_shared_sinks(self.sinks is not None)
            refuse_shared_window(self.window, layout.max_seqlen_q)
        if layout.ring is not None:
            steps = layout.ring.steps(self.window)
            return attend_around(query, key, value, steps, self.context_group, scale=self.scale)
        if layout.context is not None or (layout.tree is not None and layout.tree.line is not None):
            key, value = gathered(key, value, self.context_group)
        query, key, value = of_one_width(query, key, value)  # after ranks have sent no padding
        return self._attend(query, key, value, layout)[..., :width]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
        """Attend to keys and values as wide as queries, which are those of all ranks that share tokens."""
        if layout.tree is not None:
            if layout.tree.line is not None:
                key, value = (x[layout.tree.line] for x in (key, value))
            return attend_along_paths(query, key, value, layout.tree, scale=self.scale)
        if layout.context is not None:
            return attend_to_gathered(
                query, key, value, layout.context, scale=self.scale, window=self.window, sinks=self.sinks
            )
        if self.sinks is not None:
            assert layout.sets is not None  # made where the model has sinks
            return attend_with_sinks(
                query, key, value, self.sinks, layout.sets, scale=self.scale, window=self.window
            )
        if layout.buckets:
            attend = self.attend or partial(causal_attention, window=self.window)
            attend = partial(attend, scale=self.scale)
            return bucketed_attention(query, key, value, layout.buckets, layout.slots, attend)
        return causal_varlen_attention(
            query,
            key,
            value,
            layout.cu_seqlens_q,
            layout.cu_seqlens_kv,
            layout.max_seqlen_q,
            layout.max_seqlen_kv,
            scale=self.scale,
            window=self.window,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"sinks": 0},
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return state


class GatedSelfAttention(PackedSelfAttention):
    """A layer whose projection has behind each query its gate, in the order of queries' channels."""

    def __init__(self, *args: Any, pieces: int, **kwargs: Any) -> None:
        """`pieces` say the order of a head (learner/backends/megatron/conversion/partial_rotation.py)."""
        super().__init__(*args, **kwargs)
        self.pieces = pieces

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedLayout, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
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


class JointlyNormedAttention(PackedSelfAttention):
    """A layer of a rank that has all heads: others would have to add up squares over ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width, config = self.hidden_size_per_attention_head, self.config
        self.q_layernorm = RMSNorm(config, config.num_attention_heads * width, config.layernorm_epsilon)
        self.k_layernorm = RMSNorm(config, config.num_query_groups * width, config.layernorm_epsilon)

    def heads(self, mixed: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
        heads = heads_by_group(mixed, self.head_settings)
        query, key, value = torch.split(heads, [heads.shape[2] - 2, 1, 1], dim=2)
        query = self.q_layernorm(query.flatten(1)).view(query.shape)
        key = self.k_layernorm(key.flatten(1)).view(key.shape)
        normed = torch.cat((query, key, value), dim=2).view(mixed.shape)
        return self.split_heads(normed, None, None, layout.rotations[self.rope], self.head_settings)
