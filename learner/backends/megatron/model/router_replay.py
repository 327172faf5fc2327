"""Has the routers of megatron-core send tokens where they are given
(learner/backends/shared/given_experts.py).

Megatron-core has a replay of its own, which is one list for all routers of a process and is read in the
order of the passes. Here the experts travel in the pack's `PackedLayout`, so that a pipeline may interleave
passes and recompute layers as it likes."""

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.conversion.base import Experts
from learner.backends.megatron.core.megatron_core import TransformerConfig, TransformerLayer, parallel_state
from learner.backends.shared.given_experts import GivenExperts
from learner.data.packing import OWN_CHOICE, MicroBatch
from learner.distributed.process_group import device


class RouterExperts(GivenExperts):
    """The experts of a layer, as megatron-core's router asks for them."""

    def __init__(self, groups: int = 1, chosen_groups: int = 1) -> None:
        """Let the router choose experts of the best `chosen_groups` of `groups` only."""
        super().__init__()
        self._groups = groups, chosen_groups

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores [T, k] of the experts that tokens go to, and the experts. `scores` are of all
        experts, [T, E]; `choose` is what the router itself does."""
        allowed = of_best_groups(scores, *self._groups)
        values, own = choose(allowed, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = self.instead_of(own, scores.shape[1])
        return (values if chosen is own else scores.gather(1, chosen)), chosen


class ReplayedLayer(TransformerLayer):  # type: ignore[misc]  # megatron-core is untyped
    """A layer with experts, whose router takes those that the pack gives."""

    def __init__(self, config: TransformerConfig, *args: Any, experts: Experts, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        assert not config.moe_router_fusion  # a fused router would not ask which experts are given
        router = self.mlp.router
        self.given = router.router_replay = RouterExperts(experts.groups, experts.chosen_groups)
        if experts.choice_bias:
            # Megatron-core's own is a buffer, which it moves after each step. As a parameter without a
            # gradient the bias is loaded, exported and saved as all weights are.
            del router.expert_bias
            values = torch.zeros(config.num_moe_experts, device=device())
            router.expert_bias = torch.nn.Parameter(values, requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what megatron-core's layer does, also where it is computed again for the gradient."""
        experts = kwargs["packed_seq_params"].experts
        self.given.experts = None if experts is None else experts[:, self.layer_number - 1]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.given.experts = None  # experts are large, and of this pass alone


def given_experts(modules: Iterable[torch.nn.Module]) -> dict[int, RouterExperts]:
    """Return what the layers with experts are given, by the number of the layer from 0."""
    return {module.layer_number - 1: module.given for module in modules if isinstance(module, ReplayedLayer)}


class ChosenExperts:
    """Notes to which experts the routers of this rank send the tokens of each micro-batch of a pass."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._given = given_experts(modules)
        self._by_layer: dict[int, list[Tensor]] = {}

    def __enter__(self) -> Self:
        for each in self._given.values():
            each.noted = []
        return self

    def __exit__(self, *_: object) -> None:
        self._by_layer = {layer: each.noted or [] for layer, each in self._given.items()}
        for each in self._given.values():
            each.noted = None

    def of_all_tokens(
        self, number: int, batch: MicroBatch, share: MicroBatch, config: TransformerConfig
    ) -> Tensor:
        """Gather the experts of micro-batch `number`, int16 [T, layers, k] on the host of every rank that
        shares the model; `OWN_CHOICE` in layers without experts.

        Every such rank calls this, with the whole micro-batch and its own share of it."""
        tensor = parallel_state.get_tensor_model_parallel_group()
        rows = len(share.tokens if share.tree is None else share.tree.source)
        shape = (rows, config.num_layers, config.moe_router_topk)
        found = torch.zeros(shape, dtype=torch.int32, device=device())  # NCCL adds no int16
        for layer, chosen in self._by_layer.items():
            first = tensor.rank() * len(chosen[number]) if config.sequence_parallel else 0
            found[first : first + len(chosen[number]), layer] = chosen[number].int() - OWN_CHOICE
        for group in (tensor, parallel_state.get_pipeline_model_parallel_group()):
            _add_up(found, group)  # each rank has zeros where the others have experts
        tokens, places = _places(batch, share)
        whole = torch.zeros((len(batch.tokens), *shape[1:]), dtype=torch.int32, device=device())
        whole[tokens] = found[places]
        _add_up(whole, parallel_state.get_context_parallel_group())
        return (whole + OWN_CHOICE).to(torch.int16).cpu()


def _add_up(values: Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(values, group=group)


def _places(batch: MicroBatch, share: MicroBatch) -> tuple[Tensor, Tensor]:
    if share.tree is not None:
        tokens = (share.tree.computed >= 0).nonzero()[:, 0]
        return tokens, share.tree.computed[tokens]
    sequence, offset = share.sequence_of_token, share.position_ids
    lengths = torch.tensor(batch.lengths, device=device())
    places = (offset < lengths[sequence]).nonzero()[:, 0]  # the rest is padding
    return batch.cu_seqlens.to(device())[sequence[places]] + offset[places], places


def of_best_groups(scores: Tensor, groups: int, chosen: int) -> Tensor:
    """Return scores of experts [T, E] with those of all but the `chosen` best groups at minus infinity.

    A group's score is the sum of its two largest (arXiv:2412.19437, section 2.1.2). Megatron-core's own
    groups add up as many as a group gives experts on average, which is another number in some models."""
    if chosen == groups:
        return scores
    grouped = scores.view(len(scores), groups, scores.shape[1] // groups)  # of 0 tokens too
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
    out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(out[..., None], -torch.inf).flatten(1)
