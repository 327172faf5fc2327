"""Notes to which experts a mixture of experts sent the tokens of a pass, as its routers choose."""

import re
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.engines.expert_routing import Routing
from bus.errors import EngineError

_LAYER = re.compile(r"layers\.(\d+)\.")


class ExpertRecorder:
    """Listens to the routers of one model. What a pass chose has to be taken before the next one."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raise `ConfigError` for a model without experts, and `EngineError` for one whose routers are
        unknown."""
        self._routing = Routing.of_config(model.config.to_dict())
        self._chosen: dict[int, Tensor] = {}
        routers = [
            (int(place[1]), module)
            for name, module in model.named_modules()
            if type(module).__name__.lower().endswith("topkrouter") and (place := _LAYER.search(name))
        ]
        if not routers:
            raise EngineError(
                f"actors.engine.routed_experts: no router of {type(model).__name__} tells what it chooses: "
                "leave the setting out, or serve the model by sglang"
            )
        for layer, router in routers:
            router.register_forward_hook(partial(self._note, layer))

    def _note(self, layer: int, router: torch.nn.Module, _inputs: Any, outputs: object) -> None:
        """Keep the experts, [tokens, experts per token], the last that a router of transformers returns."""
        chosen = outputs[-1] if isinstance(outputs, tuple) else None
        if chosen is None or chosen.is_floating_point() or chosen.shape[-1] != self._routing.per_token:
            raise EngineError(
                f"actors.engine.routed_experts: {type(router).__name__} of this version of transformers does "
                "not return what it chooses: install a newer one, or leave the setting out"
            )
        self._chosen[layer] = chosen

    def taken(self, rows: int) -> np.ndarray:
        """Return where the pass sent its tokens, [rows, tokens, layers, experts per token]; zeros in layers
        that have no experts."""
        routing, chosen = self._routing, self._chosen
        first = next(iter(chosen.values()))
        none = torch.zeros_like(first)
        layers = [chosen.get(layer, none) for layer in range(routing.layers)]
        self._chosen = {}
        found = torch.stack(layers, dim=1).cpu().numpy().astype(routing.dtype)
        return found.reshape(rows, -1, routing.layers, routing.per_token)
