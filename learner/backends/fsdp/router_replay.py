"""Has the routers of a model of transformers send tokens where they are given (given_experts.py).

A router there returns its logits, the weights of the experts that it chose, and these experts. The weights
of other experts follow from the logits, in one of three ways that families have."""

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from bus.errors import ConfigError
from learner.backends.fsdp.attention import PackedSequences
from learner.backends.shared.given_experts import GivenExperts, refuse_other_experts
from learner.data.packing import OWN_CHOICE, MicroBatch
from storage.model_files.families import families_with, family_named

Weigh = Callable[[torch.nn.Module, Tensor, Tensor], Tensor]
"""Returns the weights [T, k] of experts, given the router, its logits [T, E] and the experts [T, k]."""


def by_softmax(router: torch.nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.float().softmax(-1).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def by_sigmoids(router: Any, logits: Tensor, experts: Tensor, *, smallest_sum: float = 1e-20) -> Tensor:
    """Weigh by the sigmoid of each expert, over their sum."""
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + smallest_sum)
    scaled: Tensor = weights * router.routed_scaling_factor
    return scaled


by_sigmoids_of_lfm2 = partial(by_sigmoids, smallest_sum=1e-6)


def by_softmax_of_chosen(_: torch.nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    return logits.gather(1, experts).softmax(-1)


def refuse_unknown_routers(setting: str, hf_config: PretrainedConfig) -> None:
    """Raise `ConfigError` for `learner.router_replay=<setting>` of a model whose routers are unknown here."""
    if family_named(hf_config.model_type).router is None:
        known = ", ".join(families_with(lambda family: family.router))
        raise ConfigError(
            f"learner.router_replay={setting}: the model, a {hf_config.model_type}, has no routers that "
            f"learner.backend=fsdp knows; it knows those of {known}: set it to none"
        )


class RouterReplay:
    """The routers of a model, and what they are given."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Have the routers take what a pack gives, also where layers are computed again; call this before
        layers are wrapped by others."""
        config = model.config.get_text_config()
        self._layers: int = config.num_hidden_layers
        self._per_token: int = getattr(config, "num_experts_per_tok", 0)
        self.given: dict[int, GivenExperts] = {}
        """By the number of the layer."""
        router = family_named(config.model_type).router
        for number, layer in enumerate(model.get_decoder().layers if router else ()):
            for module in layer.modules():
                if router and type(module).__name__ == router.module:
                    given = self.given[number] = GivenExperts()
                    module.register_forward_hook(partial(_send, given, resolve_name(router.weigh)))
                    layer.forward = partial(_layer_pass, layer.forward, given, number)

    def refuse_others(self, batch: MicroBatch) -> None:
        """Raise an error where a pack gives experts that are not of this model."""
        if batch.experts is None:
            return
        if not self.given:
            raise ConfigError("learner.backend=fsdp knows no routers of this model: set router_replay=none")
        refuse_other_experts(batch.experts, layers=self._layers, per_token=self._per_token)

    def note(self) -> None:
        """Begin to note where the passes that follow send their tokens."""
        for each in self.given.values():
            each.noted = []

    def noted(self) -> list[Tensor]:
        """Return where each pass since `note` sent its tokens, int16 [T, layers, k] on the host, and end
        noting; `OWN_CHOICE` in layers without experts."""
        by_layer = {number: each.noted or [] for number, each in self.given.items()}
        for each in self.given.values():
            each.noted = None
        found = []
        for of_pass in zip(*by_layer.values(), strict=True):
            shape = len(of_pass[0]), self._layers, self._per_token
            experts = of_pass[0].new_full(shape, OWN_CHOICE)
            experts[:, list(by_layer)] = torch.stack(of_pass, 1)
            found.append(experts.cpu())
        return found

    def forget_counts(self) -> None:
        """Have no figure tell of the passes so far."""
        for each in self.given.values():
            each.counts.zero_()


def _layer_pass(run: Callable[..., Any], given: GivenExperts, number: int, *args: Any, **others: Any) -> Any:
    packed: PackedSequences | None = others.get("packed")
    given.experts = None if packed is None or packed.experts is None else packed.experts[:, number]
    try:
        return run(*args, **others)
    finally:
        given.experts = None  # experts are large, and of this pass alone


def _send(
    given: GivenExperts, weigh: Weigh, router: torch.nn.Module, _: object, outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    logits, weights, own = outputs
    chosen = given.instead_of(own, logits.shape[-1])
    if chosen is not own:
        weights = weigh(router, logits, chosen).to(weights.dtype)
    return logits, weights, chosen
