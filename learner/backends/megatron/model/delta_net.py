"""Gated delta nets (arXiv:2412.06464), a linear attention whose state begins anew at each sequence of a pack.

megatron-core's own module needs kernels of the package `fla`, and takes no packs. This one computes the short
convolution and the delta rule by the functions of transformers that the layers of the FSDP backend call, on
sequences laid out apart. They call kernels of `causal_conv1d` and `fla` where those are installed. Ranks that
share the tokens of sequences share the heads here
(learner/backends/megatron/model/attention/state_layout.py)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.backends.megatron.conversion.base import DeltaSizes
from learner.backends.megatron.core.megatron_core import (
    MegatronModule,
    ProcessGroupCollection,
    TransformerConfig,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
    tensor_parallel,
)
from learner.backends.megatron.model.attention.attention import PackedLayout
from learner.backends.megatron.model.attention.state_layout import StateLayout, to_heads, to_tokens
from learner.backends.shared.packed_attention import within_sequences

DIVIDED = ("conv_weight", "A_log", "dt_bias")
"""Parameters of which tensor-parallel ranks have those of their heads."""


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]  # megatron-core is untyped
    """A layer of linear attention, whose heads tensor-parallel ranks share, and context ranks these shares.
    Everything is in the order of heads of keys: what belongs to one comes before what belongs to the next."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        sizes: DeltaSizes,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.sizes, self.tp_group, self.context_group = sizes, pg_collection.tp, pg_collection.cp
        ranks = pg_collection.tp.size()
        self.key_heads, self.value_heads = sizes.key_heads // ranks, sizes.value_heads // ranks
        keys, values = sizes.key_heads * sizes.key_width, sizes.value_heads * sizes.value_width
        settings = {
            "config": config, "init_method": config.init_method, "bias": False, "tp_group": self.tp_group
        }  # fmt: skip
        self.in_proj = tensor_parallel.ColumnParallelLinear(
            config.hidden_size, 2 * (keys + values + sizes.value_heads), gather_output=False, **settings
        )
        self.out_proj = tensor_parallel.RowParallelLinear(
            values, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **settings
        )
        mixed = (2 * keys + values) // ranks
        self.conv_weight = self._parameter(mixed, 1, sizes.taps)
        self.A_log, self.dt_bias = self._parameter(self.value_heads), self._parameter(self.value_heads)
        for name in DIVIDED:
            tensor_parallel.set_tensor_model_parallel_attributes(
                getattr(self, name), is_parallel=True, dim=0, stride=1
            )
        self.norm_weight = self._parameter(sizes.value_width)
        """Weight of the norm of each head, whose gradients ranks add up where they use it."""

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedLayout, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the tokens of each sequence: [T, 1, H] to the same and a bias, of which there is none."""
        projected, _bias = self.in_proj(hidden_states)
        *inputs, gate = self._by_kind(projected)
        layouts = packed_seq_params.states  # made where the model has such layers
        if len(layouts) == 1:
            heads = self._heads(layouts[0], inputs)
        else:
            parts = zip(*(torch.split(x, [each.tokens for each in layouts]) for x in inputs), strict=True)
            heads = torch.cat([self._heads(*each) for each in zip(layouts, parts, strict=True)])
        return self.out_proj(self._gated(heads, gate).flatten(1)[:, None])  # type: ignore[no-any-return]

    def _by_kind(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Return of outputs of the projection, [T, 1, n], what the convolution sees and what the steps and
        decays are made of, each [T, heads of keys, m], and the gate, [T, values, v]."""
        sizes, tokens = self.sizes, len(projected)
        of_head = sizes.values_of_key_head
        value = of_head * sizes.value_width
        widths = [2 * sizes.key_width + value, value, of_head, of_head]
        mixed, gate, step, decay = torch.split(projected.view(tokens, self.key_heads, -1), widths, dim=-1)
        return mixed, step, decay, gate.reshape(tokens, self.value_heads, -1)

    def _heads(self, layout: StateLayout, inputs: Sequence[Tensor]) -> Tensor:
        """Return the heads' outputs for this rank's tokens of these sequences, [T, values, v]; of those that
        are cut it computes some of the heads of all tokens, with the parameters of these heads."""
        parameters = [getattr(self, name) for name in DIVIDED]
        if not layout.is_cut:
            return self._within_sequences(layout, inputs, parameters)
        ranks, rank = self.context_group.size(), self.context_group.rank()
        own = [parameter.chunk(ranks)[rank] for parameter in parameters]
        found = self._within_sequences(layout, to_heads(inputs, self.context_group), own)
        return to_tokens(found, self.context_group)

    def _within_sequences(
        self, layout: StateLayout, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> Tensor:
        """Return the outputs of the heads that these parameters are of, [T, values, v]."""
        mixed, step, decay = (x.flatten(1) for x in inputs)
        kernel, decay_base, bias = parameters
        # The root of the decay of a token (arXiv:2412.06464, section 3.1) is in float32: bfloat16 would round
        # what is near 1, and it is multiplied over a sequence.
        decay = -decay_base.float().exp() * F.softplus(decay.float() + bias)

        def mix(kernel: Tensor, *packed: Tensor) -> Tensor:
            return within_sequences(partial(self._mixed, kernel), packed, layout.buckets, layout.slots)

        packed = kernel.squeeze(1), mixed, decay, step.sigmoid()
        if self.config.recompute_granularity == "selective" and self.training:
            return tensor_parallel.checkpoint(mix, False, *packed)  # type: ignore[no-any-return]
        return mix(*packed)

    def _mixed(self, kernel: Tensor, mixed: Tensor, decay: Tensor, step: Tensor) -> Tensor:
        """Return the heads' outputs of several sequences, [n, length, values, v].

        Args:
            kernel: [c, taps], of the convolution.
            mixed: [n, length, c], what queries, keys and values are made of.
            decay: float32 [n, length, values], logarithms of what is left of the state at each token.
            step: [n, length, values], how far a key's value moves to that of the token."""
        # Here because the import takes seconds, and few models have such layers.
        from transformers.models.qwen3_next.modeling_qwen3_next import (
            causal_conv1d_fn,
            torch_chunk_gated_delta_rule,
        )

        sizes = self.sizes
        heads = causal_conv1d_fn(mixed.transpose(1, 2), kernel, None, activation="silu").transpose(1, 2)
        widths = [sizes.key_width, sizes.key_width, sizes.values_of_key_head * sizes.value_width]
        query, key, value = heads.unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
        value = value.reshape(*value.shape[:2], -1, sizes.value_width)
        # Transformers before 5.24 wants queries and keys once for each head of the values.
        if (repeats := sizes.values_of_key_head) > 1:
            query, key = query.repeat_interleave(repeats, dim=2), key.repeat_interleave(repeats, dim=2)
        found, _state = torch_chunk_gated_delta_rule(
            query, key, value, g=decay, beta=step, use_qk_l2norm_in_kernel=True
        )
        return found  # type: ignore[no-any-return]

    def _gated(self, heads: Tensor, gate: Tensor) -> Tensor:
        """Norm each head and weigh it by its gate; [T, values, v] to the same."""
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        wide = heads.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        normed = weight * (wide * scale).to(heads.dtype)
        return (normed * F.silu(gate.float())).to(heads.dtype)  # type: ignore[no-any-return]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(DIVIDED, 0), sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=(metadata or {})["dp_cp_group"],
        )  # fmt: skip
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state
