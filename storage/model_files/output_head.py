"""Whether a model directory has an output layer of its own that its config.json does not promise.

transformers takes the file's output layer then (`PreTrainedModel.tie_weights`); SGLang and Megatron go by
config.json alone, and would compute with the embedding."""

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bus.codec import Json
from bus.errors import ConfigError
from storage.model_files.model_reading import raw_config
from storage.model_files.weight_files import weight_files

TIED = "tie_word_embeddings"
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_PIECE = 1 << 24


class _Tensor(NamedTuple):
    file: Path
    kind: tuple[str, tuple[int, ...]]
    """Name of the dtype, and the shape."""
    begin: int
    end: int


def has_other_head(directory: Path) -> bool:
    """Return whether the files have another output layer than the embedding, and config.json denies that, or
    does not say: then the default of the model's type may tie them.

    Raises `ConfigError` for a file of weights without a readable header."""
    if not (config := raw_config(directory)):
        return False  # others say what is wrong with it
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    if config.get(TIED, text.get(TIED)) is False:
        return False
    try:
        files = [file for name in weight_files(directory) if (file := directory / name).is_file()]
    except ConfigError:
        return False  # whoever reads the weights says what is wrong with them
    tensors = [found for file in files for found in _tensors(file).items()]
    heads = [tensor for name, tensor in tensors if name.endswith(HEAD)]
    embeddings = [tensor for name, tensor in tensors if name.endswith(EMBEDDING)]
    return len(heads) == len(embeddings) == 1 and not _same(heads[0], embeddings[0])


def untied(config: Mapping[str, Json]) -> dict[str, Json]:
    """Return a config.json by which everybody takes the output layer of the files."""
    found = {**config, TIED: False}
    text = found.get("text_config")
    return found | ({"text_config": {**text, TIED: False}} if isinstance(text, dict) and TIED in text else {})


def _tensors(file: Path) -> dict[str, _Tensor]:
    try:
        with file.open("rb") as opened:
            start = 8 + int.from_bytes(opened.read(8), "little")
            if start > file.stat().st_size:
                raise ValueError("it ends within its header")  # noqa: TRY301
            header = json.loads(opened.read(start - 8))
        return {
            name: _Tensor(
                file, (one["dtype"], tuple(one["shape"])), *(start + at for at in one["data_offsets"])
            )
            for name, one in header.items()
            if name.endswith((HEAD, EMBEDDING))
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no file of weights, or a torn one: {error}") from error


def _same(one: _Tensor, other: _Tensor) -> bool:
    if one.kind != other.kind:
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        a = mmap.mmap(left.fileno(), 0, access=mmap.ACCESS_READ)
        b = mmap.mmap(right.fileno(), 0, access=mmap.ACCESS_READ)
        with a, b:
            pieces = range(0, one.end - one.begin, _PIECE)
            return all(_piece(a, one, at) == _piece(b, other, at) for at in pieces)


def _piece(mapped: mmap.mmap, tensor: _Tensor, at: int) -> bytes:
    return mapped[tensor.begin + at : min(tensor.begin + at + _PIECE, tensor.end)]
