"""Weights that a learner publishes, as a model of transformers takes them."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.engines.embedded.fused_experts import (
    fuse_experts,
    under_model_names,
    without_heads_behind,
)
from bus.errors import EngineError
from storage.model_files.text_model import is_multimodal, own_name
from storage.weights.fp8 import dequantised
from storage.weights.int4 import unpacked
from storage.weights.quantisation import BLOCKS, PACKED, int4_names, scale_names, weight_of


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
    """Return the weights in float32 that codes and scales stand for; the others are as they are.

    Raises `EngineError` for codes without scales."""
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
