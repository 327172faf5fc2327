"""Directories of weights that are written tensor by tensor, and appear when all was read back as it was
written."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from bus.errors import ConfigError, StorageError
from bus.process.work_progress import Advance, long_work, tracked, uncounted
from learner.model_directories.checkpoint_manifest import (
    MANIFEST,
    damaged_files,
    read_manifest,
    refuse_damage,
    refuse_other_model,
    written_by,
)
from learner.model_directories.lazy_weights import LazyWeights, Spec, main_dtype, tensor_digest
from learner.model_directories.model_directory import (
    SHARD_BYTES,
    HFWeights,
    load_hf_config,
    save_hf_directory,
    tokenizer_directory,
)
from storage.disk import checkpoints
from storage.disk.atomic_files import filling


@dataclass(frozen=True)
class Converted:
    """Account of what was written and read back."""

    directory: Path
    tensors: int
    size_bytes: int
    beside: int = 0
    """Tensors among them that are no part of what is trained."""

    def __str__(self) -> str:
        heads = f", {self.beside} of them of heads for several next tokens" if self.beside else ""
        written = f"{self.tensors} tensors, {self.size_bytes / 1e9:.3f} GB, verified"
        return f"wrote {self.directory}: {written}{heads}"


class Digesting(LazyWeights):
    """Notes the digest of every tensor that is read."""

    def __init__(self, weights: LazyWeights) -> None:
        super().__init__(weights)
        self.digests: dict[str, str] = {}
        self._weights = weights
        self._advance: Advance = uncounted

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name]
        self.digests[name] = tensor_digest(tensor)
        self._advance(tensor.nbytes)
        return tensor

    @contextmanager
    def shown(self, what: str) -> Iterator[None]:
        """Show how many of all bytes are read inside."""
        with long_work(what, sum(self.spec(name).size_bytes for name in self)) as self._advance:
            yield

    def spec(self, name: str) -> Spec:
        return self._weights.spec(name)


def verified_size(written: LazyWeights, digests: Mapping[str, str]) -> int:
    """Read all weights back, and return their size in bytes. Raises `StorageError` where a bit differs."""
    reading = tracked(digests.items(), "reading back what was written")
    if differing := [name for name, digest in reading if tensor_digest(written[name]) != digest]:
        raise StorageError(
            f"what was written reads back otherwise: {', '.join(differing)}; is the disk sound?"
        )
    return sum(written.spec(name).size_bytes for name in digests)


def refuse_existing(target: Path) -> None:
    """Raise `ConfigError` for a directory that is there already."""
    if target.exists():
        raise ConfigError(f"{target} exists already: remove it, or choose another")


@dataclass(frozen=True)
class Checkpoints:
    """Reads the checkpoints of one backend."""

    backend: str
    differences: Callable[[Path, Mapping[str, Any], PretrainedConfig], list[str]]
    """Lists by what a checkpoint, with its manifest, is of another model; raises `ConfigError` for a model
    that cannot be converted."""
    weights: Callable[[Path, PretrainedConfig, Path | None], LazyWeights]
    """Opens the weights; the directory is that of a model whose further heads go along."""
    beside: Callable[[PretrainedConfig], Callable[[str], bool]] = lambda _: lambda _: False
    """Tells which tensors are no part of what is trained."""


def checkpoint_to_hf(
    kind: Checkpoints, source: Path, target: Path, model: Path | None = None, *,
    begun_from: Path | None = None, shard_bytes: int = SHARD_BYTES,
) -> Converted:  # fmt: skip
    """Write the main weights of a checkpoint, bit for bit, as a Hugging Face directory.

    Args:
        kind: checkpoints of the backend that wrote it.
        source: a checkpoint, or a directory of several, of which the newest is taken.
        target: must not exist yet.
        model: directory whose configuration and tokenizer go along, and heads for several next tokens that
            the checkpoint does not have, if it has weights; without it the configuration and the tokenizer
            that lie in `source`.
        begun_from: directory of the model that the checkpoint's run began with, where `model` is none: what
            `source` lacks of tokenizer and heads comes from there.
        shard_bytes: largest size of one file of weights.

    Raises `StorageError` for a damaged checkpoint, `ConfigError` for one of adapters alone or of another
    backend, and for a configuration or a tokenizer that is not its own; then, and after any other failure,
    there is no `target`."""
    refuse_existing(target)
    if not (source / MANIFEST).is_file():
        source = checkpoints.latest(source) or source
    manifest = read_manifest(source)
    if (backend := written_by(manifest)) != kind.backend:
        whose = "FSDP's" if backend == "fsdp" else "Megatron's"
        raise ConfigError(f"checkpoint {source} is {whose}: convert it by `launch convert {backend}-to-hf`")
    described = model or source
    hf_config = load_hf_config(described)
    refuse_other_model(source, kind.differences(source, manifest, hf_config))
    tokenizer_dir = tokenizer_directory(hf_config, described, begun_from)
    refuse_damage(source, damaged_files(source, manifest, manifest["files"]))
    seen = Digesting(kind.weights(source, hf_config, model or begun_from))
    hf_config.dtype = main_dtype(map(seen.spec, seen))  # every tensor is written in its own
    with filling(target) as temporary:
        with seen.shown(f"converting {source}"):
            save_hf_directory(temporary, hf_config, seen, tokenizer_dir, shard_bytes=shard_bytes)
        size_bytes = verified_size(HFWeights(temporary), seen.digests)
    return Converted(target, len(seen.digests), size_bytes, sum(map(kind.beside(hf_config), seen)))
