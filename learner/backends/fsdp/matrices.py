"""Tells which parameters of a model of transformers are made of matrices that Muon updates.

A matrix is one of the model's files: each expert there has its own, and so have gate and up."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from bus.errors import ConfigError
from learner.backends.fsdp.build import empty_model
from learner.backends.fsdp.names import FileNames, freeze
from learner.backends.shared.trainable import TrainableWeights

FUSED = re.compile(r"qkv|query_key_value|c_attn|gate_up|in_proj", re.IGNORECASE)
"""Names in files of tensors that are several matrices in one."""
ROUTERS = {"gate", "router"}
"""Names of modules that send tokens to experts, and of those around them."""


@dataclass(frozen=True)
class FileMatrices:
    """A parameter, which is one slice, and its matrices in files."""

    name: str
    names: FileNames

    @property
    def slice_shapes(self) -> list[tuple[int, ...]]:
        return [self.names.tensors[self.name].shape]

    def matrices(self, slices: Sequence[Tensor]) -> list[Tensor]:
        [whole] = slices
        return list(self.names.split(self.name, whole).values())

    def slices(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        state = dict(zip(self.names.tensors[self.name].files, matrices, strict=True))
        return [self.names.merge(self.name, state)]


def refuse_fused_matrices(hf_config: PretrainedConfig, trainable: TrainableWeights) -> None:
    """Raise `ConfigError` as `matrix_names` does, and for a model that cannot be trained, before its weights
    are read."""
    names, model = FileNames(hf_config), empty_model(hf_config, torch.device("meta"))
    freeze(model, names, trainable)
    matrix_names(model, names)


def matrix_names(model: PreTrainedModel, names: FileNames) -> set[str]:
    """Return the names of the parameters that are made of matrices.

    Raises `ConfigError` where a trained tensor of the files is several matrices in one, and where one may be
    made of matrices that cannot be found."""
    found, trained = set(_hidden_weights(model)), _trained_weights(model)
    files = [(part, shape) for name in found & trained for part, shape in names.tensors[name].files.items()]
    if fused := sorted(part for part, shape in files if len(shape) != 2 or FUSED.search(part)):
        raise ConfigError(
            f"optimizer.matrices=muon cannot tell the matrices apart that {fused[0]} of this model is made "
            "of: set it to adamw, freeze it with model.freeze, or set learner.backend to megatron if that "
            "has the model's family"
        )
    if unknown := sorted(trained - found - set(_other_weights(model))):
        raise ConfigError(
            f"optimizer.matrices=muon cannot tell which matrices {unknown[0]} of this model is made of "
            f"({len(unknown)} such weights): set it to adamw, freeze them with model.freeze, or set "
            "learner.backend to megatron if that has the model's family"
        )
    return {name for name in found if all(min(each) > 1 for each in names.tensors[name].files.values())}


def _hidden_weights(model: PreTrainedModel) -> Iterator[str]:
    for path, module in model.named_modules():
        if _is_of_adamw(path, module, model):
            continue
        if isinstance(module, torch.nn.Linear):
            yield f"{path}.weight"
        elif path.endswith("experts"):
            parameters = module.named_parameters(recurse=False)
            yield from (f"{path}.{name}" for name, each in parameters if each.dim() == 3)


def _is_of_adamw(path: str, module: torch.nn.Module, model: PreTrainedModel) -> bool:
    """Tell whether the weights of a module are none of Muon's, though they have rows and columns."""
    is_embedding = isinstance(module, torch.nn.Embedding) or module is model.get_output_embeddings()
    return is_embedding or not ROUTERS.isdisjoint(path.split("."))


def _other_weights(model: PreTrainedModel) -> Iterator[str]:
    for path, module in model.named_modules():
        if _is_of_adamw(path, module, model):
            yield from (f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))


def _trained_weights(model: PreTrainedModel) -> set[str]:
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return {name for name, each in trained.items() if each.dim() > 1 and not name.endswith("bias")}
