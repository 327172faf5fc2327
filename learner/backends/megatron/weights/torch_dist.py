"""megatron-core's `torch_dist` files, read and written one tensor at a time, without a world of ranks."""

import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from transformers import PretrainedConfig

from bus.errors import StorageError
from learner.backends.megatron.conversion.base import HEAD_LAYER, Rule, Shape, as_it_came, is_adapter
from learner.backends.megatron.conversion.families import family_of
from learner.backends.megatron.weights.stacks import StackedWeights, stacks_of
from learner.backends.shared.lora import refuse_adapters_alone
from learner.model_directories.lazy_weights import LazyWeights, Spec

TENSORS = "__0_0.distcp"
"""The file that holds all tensors of a converted model."""
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms that Transformer Engine fuses into the layer after them, which gives them their name in files."""
LAYER_NORM = re.compile(rf"(decoder\.layers\.\d+\.|{re.escape(HEAD_LAYER)})(.+_layernorm\.weight)")


def is_checkpoint(directory: Path) -> bool:
    return (directory / ".metadata").is_file()


@dataclass(frozen=True)
class TensorAddress:
    """Says where a tensor of the model lies: a whole one in the files, or one of a stack."""

    key: str
    index: int | None = None
    """Index along the first dimension of the stack."""


def place_of(megatron: str) -> TensorAddress:
    """Find a parameter of the model in the files, where the experts of a layer are one tensor."""
    if norm := LAYER_NORM.fullmatch(megatron):
        return TensorAddress(norm[1] + FUSED_NORMS.get(norm[2], norm[2]))
    if expert := re.fullmatch(r"(.+\.experts\.)local_experts\.(\d+)\.(.+)", megatron):
        return TensorAddress(f"{expert[1]}experts.{expert[3]}", int(expert[2]))
    return TensorAddress(megatron)


class MegatronWeights(LazyWeights):
    """The model in a checkpoint, by Hugging Face names and in their layout."""

    def __init__(
        self,
        directory: Path,
        rules: Sequence[Rule],
        shape: Shape,
        beside: Callable[[str], bool] = lambda name: False,
        head: Sequence[Rule] = (),
    ) -> None:
        """Read the metadata, which may have tensors `beside` the model, and its `head`. Raises `StorageError`
        when it is unreadable or lacks a tensor, and `ConfigError` where there are adapters alone that `rules`
        do not ask for."""
        self._directory = directory
        self._shape = shape
        self._metadata = _read_metadata(directory)
        keys = self._metadata.state_dict_metadata
        self.has_trained_head = any(place_of(rule.megatron).key in keys for rule in head)
        """Says that there is a head for the token after the next that a run has trained."""
        # a run saves nothing beside the model, and names in megatron-core may begin as those in files do
        rules = [*rules, *(head if self.has_trained_head else map(as_it_came, filter(beside, keys)))]
        self._rule_of = {part: (rule, n) for rule in rules for n, part in enumerate(rule.parts)}
        super().__init__(self._rule_of)
        self._last: tuple[Rule, Sequence[Tensor]] | None = None
        wanted = any(is_adapter(rule.megatron) for rule in rules)
        if not wanted and any(is_adapter(key) for key in self._metadata.state_dict_metadata):
            refuse_adapters_alone(directory)
        lacking = {place_of(rule.megatron).key for rule in rules} - self._metadata.state_dict_metadata.keys()
        if lacking:
            raise StorageError(f"checkpoint {directory} lacks {', '.join(sorted(lacking))}")

    def __getitem__(self, name: str) -> Tensor:
        rule, part = self._rule_of[name]
        if self._last is None or self._last[0] is not rule:  # parts of a tensor come in turn
            self._last = None
            self._last = rule, rule.layout.split(self._read(rule), self._shape)
        return self._last[1][part].reshape(self.spec(name).shape)

    def spec(self, name: str) -> Spec:
        rule, part = self._rule_of[name]
        whole = self._spec(rule)
        return Spec(tuple(rule.layout.part_shapes(whole.shape, self._shape)[part]), whole.dtype)

    def _spec(self, rule: Rule) -> Spec:
        place = place_of(rule.megatron)
        stored = self._stored(place)
        size = tuple(stored.size) if place.index is None else tuple(stored.size[1:])
        if rule.counts_tokens:  # without the padding that makes it divide among ranks
            size = (self._shape.vocab, *size[1:])
        return Spec(size, stored.properties.dtype)

    def _stored(self, place: TensorAddress) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata[place.key]
        if not isinstance(stored, TensorStorageMetadata):
            raise StorageError(f"checkpoint {self._directory}: {place.key} is no tensor")
        return stored

    def _read(self, rule: Rule) -> Tensor:
        place = place_of(rule.megatron)
        stored = self._stored(place)
        size = tuple(stored.size) if place.index is None else (1, *stored.size[1:])
        whole = torch.empty(size, dtype=stored.properties.dtype)
        first = place.index or 0
        for chunk in stored.chunks:
            start = chunk.offsets[0] - first if chunk.offsets else 0
            if start < size[0] and start + chunk.sizes[0] > 0:
                _paste(whole, self._read_chunk(place.key, chunk), start, chunk.offsets[1:])
        if place.index is not None:
            return whole[0]
        return whole[: self._shape.vocab] if rule.counts_tokens else whole

    def _read_chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        stored = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        file = self._directory / stored.relative_path
        try:
            with file.open("rb") as opened:
                opened.seek(stored.offset)
                tensor: Tensor = torch.load(io.BytesIO(opened.read(stored.length)), weights_only=True)
                return tensor
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            raise StorageError(f"cannot read {key} in {file}: {error}") from error


def model_in(directory: Path, hf_config: PretrainedConfig) -> LazyWeights:
    """Return the weights in a checkpoint by their names in files; raises as `MegatronWeights` does."""
    family = family_of(hf_config)
    shape = family.shape(hf_config)
    rules, head = list(family.rules(shape)), list(family.head(shape))
    weights = MegatronWeights(directory, rules, shape, family.beside, head)
    stacks = stacks_of(hf_config)
    return StackedWeights(weights, stacks) if stacks else weights


def _paste(whole: Tensor, chunk: Tensor, start: int, offsets: Sequence[int]) -> None:
    skipped = max(0, -start)
    chunk = chunk[skipped : skipped + whole.shape[0] - max(0, start)]
    target = whole.narrow(0, max(0, start), chunk.shape[0])
    for dim, offset in enumerate(offsets, 1):
        target = target.narrow(dim, offset, chunk.shape[dim])
    target.copy_(chunk)


def _read_metadata(directory: Path) -> Metadata:
    try:
        return FileSystemReader(directory).read_metadata()
    except (OSError, EOFError, ValueError, AttributeError, ImportError) as error:
        raise StorageError(f"cannot read the metadata of checkpoint {directory}: {error}") from error


def write_tensors(directory: Path, specs: Mapping[str, Spec], make: Callable[[str], Tensor]) -> None:
    """Write tensors under their names in the model, calling `make` for one after the other.

    Torch's own writer keeps all of them until the file is complete.

    Args:
        directory: where the files go.
        specs: by the name of the parameter; experts of a layer become one stack.
        make: returns the tensor of that name."""
    stacks = Counter(place.key for place in map(place_of, specs) if place.index is not None)
    stored: dict[str, TensorStorageMetadata] = {}
    written: list[WriteResult] = []
    with (directory / TENSORS).open("wb") as file:
        for name, spec in specs.items():
            place = place_of(name)
            whole, chunk = _size_and_chunk(place, spec, stacks[place.key])
            tensor = stored.setdefault(
                place.key, TensorStorageMetadata(TensorProperties(dtype=spec.dtype), whole, chunks=[])
            )
            tensor.chunks.append(chunk)
            start = file.tell()
            torch.save(_own_storage(make(name)).reshape(chunk.sizes), file)
            length = file.tell() - start
            index = MetadataIndex(place.key, chunk.offsets)
            written.append(WriteResult(index, length, _StorageInfo(TENSORS, start, length)))
    FileSystemWriter(directory).finish(Metadata({**stored}), [written])


def _size_and_chunk(
    place: TensorAddress, spec: Spec, stacked: int
) -> tuple[torch.Size, ChunkStorageMetadata]:
    """Return the size of the whole tensor in the files, and where this one lies in it."""
    inner = torch.Size(spec.shape)
    none = torch.Size([0] * len(inner))
    if place.index is None:
        return inner, ChunkStorageMetadata(none, inner)
    offsets, sizes = torch.Size((place.index, *none)), torch.Size((1, *inner))
    return torch.Size((stacked, *inner)), ChunkStorageMetadata(offsets, sizes)


def _own_storage(tensor: Tensor) -> Tensor:
    """Copy what is part of something larger, all of which torch.save would write."""
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
