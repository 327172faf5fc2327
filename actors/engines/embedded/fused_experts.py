"""Weights as published become those that transformers computes with: under its names, experts, one tensor
each, as fused tensors, and without heads for several next tokens."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bus.errors import EngineError

_ONE = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
"""Qwen's and Mixtral's words."""


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_LANGUAGE = "model.language_model."
"""Begins the names of the language model in a vision-language model."""
_APART = "mtp."
"""Begins the names of heads for several next tokens that are no layers (Qwen3-Next, Qwen3.5)."""


def without_heads_behind(state: Mapping[str, Tensor], config: Any) -> Mapping[str, Tensor]:
    """Leave out heads for several next tokens, which transformers lacks: layers behind the model's, and those
    with names of their own."""
    heads, layers = getattr(config, "num_nextn_predict_layers", None) or 0, config.num_hidden_layers

    def is_behind(name: str) -> bool:
        place = _LAYER.match(name)
        return name.startswith(_APART) or (place is not None and layers <= int(place[1]) < layers + heads)

    return {name: each for name, each in state.items() if not is_behind(name)}


def under_model_names(state: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Give what files of Qwen2.5-VL call `visual.` and `model.layers.` the names that its parts have in
    transformers, where the model holds a tensor of that name."""

    def own(name: str) -> str:
        renamed = f"model.{name}" if name.startswith("visual.") else name.replace("model.", _LANGUAGE, 1)
        return renamed if name not in held and renamed in held else name

    return {own(name): tensor for name, tensor in state.items()}


def fuse_experts(
    state: Mapping[str, Tensor], held: Mapping[str, Tensor], *, complete: bool
) -> Mapping[str, Tensor]:
    """Replace `experts.3.up_proj.weight` and its like by `experts.gate_up_proj` and `experts.down_proj`.

    Args:
        state: what came, under the names of model files.
        held: the model's tensors; they give the experts that did not come.
        complete: whether all have to come.
    Raises EngineError for experts and shapes that the model does not have, and for missing ones."""
    fused: dict[str, Tensor] = {}
    parts: Counter[str] = Counter()
    for published, tensor in state.items():
        name = published.replace(".block_sparse_moe.", ".mlp.") if published not in held else published
        match = _ONE.fullmatch(name)
        part = _PARTS.get(match["part"]) if match else None
        if match is None or part is None:
            fused[name] = tensor
            continue
        target = f"{match['experts']}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        if target not in held:
            raise EngineError(f"the model has no experts for {published}: these are another model's weights")
        if target not in fused:
            fused[target] = held[target].detach().clone()
        place = _place(fused[target], int(match["number"]), part, published)
        if place.shape != tensor.shape:
            raise EngineError(
                f"{published} has shape {tuple(tensor.shape)}, the model's is {tuple(place.shape)}"
            )
        place.copy_(tensor)
        parts[target] += 1
    for target, count in parts.items() if complete else ():
        wanted = len(held[target]) * (1 if target.endswith("down_proj") else 2)
        if count != wanted:
            raise EngineError(f"the first weights must be complete, {target} got {count} of {wanted} parts")
    return fused


def _place(whole: Tensor, number: int, part: str, name: str) -> Tensor:
    """Return where one expert's projection lies in [E, out, in]; the gate's rows are before those of up."""
    if number >= len(whole):
        raise EngineError(f"{name}: the model has {len(whole)} experts")
    half = whole.shape[1] // 2
    rows = {"gate": slice(0, half), "up": slice(half, None), "down": slice(None)}[part]
    return whole[number][rows]
