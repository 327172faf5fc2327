"""Tells under which names model files have the tensors of a model of transformers, and converts both ways.

Most tensors are the same in both. Of mixtures, transformers keeps all experts of a layer in one tensor, and
files have one or two for each expert."""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from bus.errors import ConfigError
from learner.backends.fsdp.build import empty_model
from learner.backends.shared.trainable import TrainableWeights


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or a lasting buffer, and what files have of it."""

    shape: tuple[int, ...]
    files: Mapping[str, tuple[int, ...]]
    """Shapes by their names in files."""

    @property
    def is_as_in_files(self) -> bool:
        """Tell whether files have the same tensor, under whatever name."""
        return list(self.files.values()) == [self.shape]


class FileNames:
    """The tensors of a model by their names in it, and their conversion."""

    def __init__(self, hf_config: PretrainedConfig) -> None:
        """Find names on a model without memory. Raises `ConfigError` where files mix several tensors."""
        self._model = empty_model(hf_config, torch.device("meta"))
        self.tensors: dict[str, ModelTensor] = {}
        found = {name: tensor.detach() for name, tensor in lasting_tensors(self._model).items()}
        for name, tensor in found.items():
            files = {part: tuple(each.shape) for part, each in self.split(name, tensor).items()}
            self.tensors[name] = ModelTensor(tuple(tensor.shape), files)
        mapping = get_model_conversion_mapping(self._model, add_legacy=False)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        together = revert_weight_conversion(self._model, found).keys()
        if together != set(self.files):
            raise ConfigError(
                f"model files of {hf_config.model_type} mix tensors of the model "
                f"({', '.join(sorted(together ^ set(self.files))[:4])}, ...): learner.backend=fsdp cannot "
                "train it"
            )

    @property
    def files(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors in files by name."""
        return {name: shape for tensor in self.tensors.values() for name, shape in tensor.files.items()}

    def is_ignored(self, name: str) -> bool:
        """Tell whether a model file may have a tensor of that name which the model does not use."""
        patterns = self._model._keys_to_ignore_on_load_unexpected or ()
        tied = self._model.all_tied_weights_keys
        of_old_files = name.endswith("rotary_emb.inv_freq")  # transformers leaves this buffer out, too
        return name in tied or of_old_files or any(re.search(pattern, name) for pattern in patterns)

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return what files have of a tensor of the model; views of it where that is possible."""
        parts: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return parts

    def merge(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        """Return a tensor of the model, made of those in `state`, which has at least its own."""
        of_tensor = self.tensors[name]
        if of_tensor.is_as_in_files:
            return state[next(iter(of_tensor.files))]
        sources = sorted(of_tensor.files, key=dot_natural_key)
        patterns = [rename_source_key(each, self._renamings, self._converters)[1] for each in sources]
        [known] = [each for each in self._converters if patterns[0] in each.source_patterns]
        converter = deepcopy(known)
        for source, pattern in zip(sources, patterns, strict=True):
            converter.add_tensor(name, source, pattern, state[source])
        merged: Tensor = converter.convert(name, model=self._model, config=self._model.config)[name]
        return merged


def freeze(hf_model: PreTrainedModel, names: FileNames, trainable: TrainableWeights) -> set[str]:
    """Freeze the parameters of a model that are not trained; return their names. Raises `ConfigError` as
    `TrainableWeights.frozen` does."""
    parameters = dict(hf_model.named_parameters())
    files = {name: list(names.tensors[name].files) for name in parameters}  # no buffer is trained
    frozen = trainable.frozen(files)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)
    return frozen


def lasting_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and buffers that model files hold, each once, by their names in the model."""
    parameters = dict(model.named_parameters())
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in every}
    return {**parameters, **buffers}
