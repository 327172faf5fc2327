"""Has the linear layers of a model of transformers multiply in fp8."""

from functools import partial

import torch
from torch import Tensor

from bus.errors import ConfigError
from learner.backends.fsdp.model import ShardedModel
from learner.backends.quantised.matmul import Fp8Linear, refuse_sizes
from storage.weights.quantisation import is_quantised


def multiply_in_fp8(model: ShardedModel) -> None:
    """Change the linear layers of attention and of MLPs, by the names that quantised formats know; experts in
    one tensor, routers, embeddings and the output layer stay.

    Raises `ConfigError` for a layer whose sizes do not allow it, and for a model without such layers."""
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and is_quantised(f"{name}.weight", tuple(module.weight.shape))
    }
    if not linear:
        raise ConfigError(
            f"learner.fp8_matmul=true knows no layer of {type(model.hf).__name__}, but linear layers by the "
            "names of known families, as q_proj and up_proj: set it to false"
        )
    for name, module in linear.items():
        refuse_sizes(name, module.weight)
        module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: torch.nn.Linear, inputs: Tensor) -> Tensor:
    output: Tensor = Fp8Linear.apply(inputs, module.weight, None)  # type: ignore[no-untyped-call]
    return output if module.bias is None else output + module.bias
