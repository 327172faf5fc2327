"""Weights that a learner publishes, as a model of transformers takes them."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bus.errors import EngineError
from storage.model_files.text_model import is_multimodal, own_name
from storage.weights.fp8 import dequantised
from storage.weights.int4 import unpacked
from storage.weights.quantisation import BLOCKS, PACKED, int4_names, scale_names, weight_of

_ONE = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
"""Qwen's and Mixtral's words."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_LANGUAGE = "model.language_model."
"""Begins the names of the language model in a vision-language model."""
_APART = "mtp."
"""Begins the names of heads for several next tokens that are no layers (Qwen3-Next, Qwen3.5)."""


def prepare_weights(
    model: PreTrainedModel, state: Mapping[str, Tensor], *, complete: bool
) -> dict[str, Tensor]:
    """Bring `state` to the model's dtype and device, so that a swap only sets pointers. What has them is
    taken as it is.

    Args:
        model: its parameters and persistent buffers give names and shapes; tied ones may be named either way.
        state: HF names, as in model files; experts may be one tensor each or fused, weights in fp8. Of a
            multimodal model a text model takes its own.
        complete: whether every tensor must be there.
    Raises EngineError for names or shapes that are not the model's, and for missing tensors."""
    held = model.state_dict(keep_vars=True)
    if is_multimodal(state) and not is_multimodal(held):
        state = {own: tensor for name, tensor in state.items() if (own := own_name(name)) is not None}
    state = without_heads_behind(without_quantisation(state), model.config.get_text_config())
    state = fuse_experts(under_model_names(state, held), held, complete=complete)
    if unknown := sorted(set(state) - set(held)):
        raise EngineError(
            f"the model has no tensors named {_some(unknown)}: these are another model's weights"
        )
    for name, tensor in state.items():
        if tensor.shape != held[name].shape:
            raise EngineError(
                f"{name} has shape {tuple(tensor.shape)}, the model's is {tuple(held[name].shape)}"
            )
        if held[name].is_floating_point() and not tensor.is_floating_point():
            raise EngineError(f"{name} is {tensor.dtype}, and weights are floating-point numbers")
    given = {id(held[name]) for name in state}
    if complete and (missing := [name for name, tensor in held.items() if id(tensor) not in given]):
        raise EngineError(f"the first weights must be complete, these are missing: {_some(missing)}")
    return {
        name: tensor.detach().to(held[name].device, held[name].dtype, memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }


def _some(names: Sequence[str]) -> str:
    return ", ".join(itertools.islice(names, 3)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def without_quantisation(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights in float32 that codes and scales stand for; the others are as they are. Raises
    `EngineError` for codes without scales."""
    in_int4 = [name.removesuffix(PACKED) for name in state if name.endswith(f".weight{PACKED}")]
    if in_int4:
        gone = {name for weight in in_int4 for name in int4_names(weight)}
        kept = {name: tensor for name, tensor in state.items() if name not in gone}
        return kept | {weight: _from_int4(weight, state) for weight in in_int4}
    if not any(tensor.dtype == torch.float8_e4m3fn for tensor in state.values()):
        return state
    return {
        name: _from_fp8(name, tensor, state) if tensor.dtype == torch.float8_e4m3fn else tensor
        for name, tensor in state.items()
        if weight_of(name) not in state
    }


def _from_fp8(name: str, codes: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    scales = next((state[each] for each in scale_names(name) if each in state), None)
    if scales is None:
        raise EngineError(f"{name} is in fp8 and came without its scales, {' or '.join(scale_names(name))}")
    return torch.from_numpy(dequantised(codes.view(torch.uint8).numpy(), scales.numpy(), BLOCKS))


def _from_int4(name: str, state: Mapping[str, Tensor]) -> Tensor:
    if missing := [each for each in int4_names(name) if each not in state]:
        raise EngineError(f"{name} is in int4 and came without {' and '.join(missing)}")
    codes, scales, shape = (state[each] for each in int4_names(name))
    words = codes.numpy().view(np.uint32)
    return torch.from_numpy(unpacked(words, scales.float().numpy(), int(shape[1])))


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
