"""The weights in a checkpoint of this backend, read one tensor at a time, without a world of ranks."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PretrainedConfig

from bus.errors import StorageError
from learner.backends.fsdp.checkpoint import MODEL, load_alone
from learner.backends.fsdp.names import FileNames
from learner.backends.shared.lora import CHANGE, refuse_adapters_alone
from learner.model_directories.lazy_weights import LazyWeights, Spec
from storage.model_files.adapter_names import PREFIX, WEIGHT, magnitude_name


def adapters_in(directory: Path, hf_config: PretrainedConfig) -> dict[str, Tensor]:
    """Return the adapters in a checkpoint by peft's names, with changes of lengths of rows by those of
    lengths, and the head of a reward model."""
    begins = MODEL + PREFIX
    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    entries = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith(begins) and isinstance(entry, TensorStorageMetadata)
    }
    load_alone(entries, directory)
    names, found = FileNames(hf_config), dict[str, Tensor]()
    layers = {begins + name: each for tensor in names.tensors for name, each in _of_experts(names, tensor)}
    for name, tensor in entries.items():
        module, _, end = name.rpartition(".lora_")
        if module in layers:
            found |= {
                f"{PREFIX}{layer}.lora_{end}": of_expert
                for layer, of_expert in zip(layers[module], tensor, strict=True)
            }
        else:
            found[_renamed(name.removeprefix(MODEL))] = tensor
    return found


def _of_experts(names: FileNames, tensor: str) -> Iterator[tuple[str, list[str]]]:
    of_projection: dict[str, list[str]] = {}
    for file in names.tensors[tensor].files:
        layer = file.removesuffix(WEIGHT)
        of_projection.setdefault(layer.rpartition(".")[2], []).append(layer)
    for projection, layers in of_projection.items():
        yield f"{tensor}.{projection}", layers


def _renamed(name: str) -> str:
    module = name.removeprefix(PREFIX)
    return magnitude_name(module.removesuffix(f".{CHANGE}")) if module.endswith(CHANGE) else name


class CheckpointWeights(LazyWeights):
    """The model in a checkpoint, by Hugging Face names: the float32 main weights."""

    def __init__(self, directory: Path, hf_config: PretrainedConfig) -> None:
        """Read the metadata. Raises `StorageError` when it is unreadable or lacks a tensor, and `ConfigError`
        where there are adapters alone."""
        self._directory = directory
        self._names = FileNames(hf_config)
        self._tensor_of = {
            file: name for name, tensor in self._names.tensors.items() for file in tensor.files
        }
        super().__init__(self._tensor_of)
        try:
            self._stored = FileSystemReader(directory).read_metadata().state_dict_metadata
        except Exception as error:  # a torn pickle raises anything
            raise StorageError(f"cannot read checkpoint {directory}: {error!r}") from error
        if any(name.startswith(MODEL + PREFIX) for name in self._stored):
            refuse_adapters_alone(directory)
        if lacking := sorted(name for name in self._names.tensors if MODEL + name not in self._stored):
            raise StorageError(f"checkpoint {directory} lacks {', '.join(lacking)}")
        self._last: tuple[str, dict[str, Tensor]] | None = None

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensor_of[name]
        if self._last is None or self._last[0] != tensor:  # parts of a tensor come in turn
            self._last = None
            self._last = tensor, self._names.split(tensor, self._read(tensor))
        return self._last[1][name]

    def spec(self, name: str) -> Spec:
        tensor = self._tensor_of[name]
        return Spec(self._names.tensors[tensor].files[name], self._metadata(tensor).properties.dtype)

    def _metadata(self, tensor: str) -> TensorStorageMetadata:
        stored = self._stored[MODEL + tensor]
        if not isinstance(stored, TensorStorageMetadata):
            raise StorageError(f"checkpoint {self._directory}: {MODEL + tensor} is no tensor")
        return stored

    def _read(self, tensor: str) -> Tensor:
        stored = self._metadata(tensor)
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        load_alone({MODEL + tensor: whole}, self._directory)
        return whole
