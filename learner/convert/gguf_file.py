"""Makes a Hugging Face directory of a GGUF file, which holds a model, its tokenizer and its chat template."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from bus.errors import ConfigError
from bus.process.work_progress import long_work, tracked
from learner.convert.written_directory import Converted, refuse_existing, verified_size
from learner.model_directories.lazy_weights import tensor_digest
from learner.model_directories.model_directory import HFWeights, save_weights
from storage.disk.atomic_files import filling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAGIC = b"GGUF"
NEEDED = ("gguf", "accelerate")
"""Packages by which transformers reads GGUF files."""
CLOSE = 1e-6
"""Largest relative difference of sums over all matrices, which are added in another order."""


def convert_gguf(file: Path, target: Path, dtype: torch.dtype) -> Converted:
    """Write the model of a GGUF file as a Hugging Face directory with weights in `dtype`.

    Quantised tensors are dequantised to float32 first. All weights are in memory at once. Raises
    `ConfigError` for a file that is none, whose architecture transformers does not read or that lacks
    weights, `StorageError` for what reads back otherwise; then there is no `target`."""
    refuse_existing(target)
    _refuse_file(file)
    with long_work(f"reading {file}"):
        model = _model(file)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    weights = {name: tensor.detach() for name, tensor in _own_weights(model).items()}
    _compare(file, weights)
    written = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    config = model.config
    config.__dict__.pop("quantization_config", None)
    config.dtype, config.architectures = dtype, [type(model).__name__]
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with filling(target) as temporary:
        config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        GenerationConfig(bos_token_id=tokenizer.bos_token_id, **ends).save_pretrained(temporary)
        save_weights(temporary, written)
        digests = {name: tensor_digest(tensor) for name, tensor in written.items()}
        size_bytes = verified_size(HFWeights(temporary), digests)
    return Converted(target, len(written), size_bytes)


def refuse_missing_packages(file: Path | str) -> None:
    """Raise `ConfigError` where transformers lacks packages by which it reads GGUF files."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"to read {file}, {' and '.join(missing)} must be installed: pip install 'sluice-rl[gguf]'"
        )


def _refuse_file(file: Path) -> None:
    refuse_missing_packages(file)
    try:
        with file.open("rb") as opened:
            begins = opened.read(len(MAGIC))
    except OSError as error:
        raise ConfigError(f"cannot read {file} ({error.strerror}): give a GGUF file") from error
    if begins != MAGIC:
        raise ConfigError(f"{file} is no GGUF file: it begins with {begins!r}, not {MAGIC!r}")


def _model(file: Path) -> "PreTrainedModel":
    """Return the model in float32. Raises `ConfigError` for one that transformers cannot make of the file."""
    try:
        config = AutoConfig.from_pretrained(
            file.parent, gguf_file=file.name, trust_remote_code=False
        )  # refuses an architecture before it reads all
        model, found = AutoModelForCausalLM.from_pretrained(
            file.parent,
            config=config,
            gguf_file=file.name,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (ValueError, KeyError, OSError, IndexError) as error:
        raise ConfigError(f"transformers makes no model of {file}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, found[kind])):
            listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise ConfigError(
                f"{file} does not fit the {model.config.model_type} that transformers makes of it: "
                f"{len(names)} {kind.replace('_keys', ' weights')}, {listed}"
            )
    return model


def _own_weights(model: "PreTrainedModel") -> dict[str, Tensor]:
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        tied = model.get_output_embeddings().weight
        embedding = model.get_input_embeddings().weight
        state = {
            name: tensor
            for name, tensor in state.items()
            if tensor.data_ptr() != tied.data_ptr()
            or tied.data_ptr() != embedding.data_ptr()
            or "embed" in name
        }
    found: dict[str, Tensor] = revert_weight_conversion(model, state)
    return found


def _compare(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Compare all matrices with what the package gguf makes of the file, by their elements' number, sum and
    sum of squares: files order rows otherwise, and join the experts of a layer.

    Raises `ConfigError` where they differ. Vectors are left out: files hold some with 1 added."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    ours = _Sums()
    for tensor in weights.values():
        ours.add(tensor.numpy())
    theirs, work = _Sums(), f"comparing with {file}"
    with long_work(work):  # a vocabulary of 262,144 tokens is read for ten seconds
        tensors = GGUFReader(file).tensors
    for found in tracked(tensors, work):
        theirs.add(dequantize(found.data, found.tensor_type))
    if not ours.agree(theirs):
        raise ConfigError(
            f"the weights that transformers reads from {file} are {ours}, and those in it {theirs}"
        )


class _Sums:
    def __init__(self) -> None:
        self.count, self.sum, self.squares = 0, 0.0, 0.0

    def __str__(self) -> str:
        return f"{self.count} elements with the sum {self.sum:.9g} and the sum of squares {self.squares:.9g}"

    def add(self, array: NDArray[np.float32]) -> None:
        if array.ndim > 1:
            self.count += array.size
            self.sum += float(array.sum(dtype=np.float64))
            self.squares += float(np.square(array, dtype=np.float64).sum())

    def agree(self, other: "_Sums") -> bool:
        near = abs(self.sum - other.sum) <= CLOSE * max(self.squares, 1.0)
        return (
            self.count == other.count and near and abs(self.squares - other.squares) <= CLOSE * other.squares
        )
