"""Reads and writes Hugging Face model directories."""

import json
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from bus.errors import ConfigError
from bus.process.work_progress import tracked
from learner.model_directories.lazy_weights import LazyWeights, Spec, State, spec_of, tensor_bytes
from storage.chats.template import ChatTemplate
from storage.disk.atomic_files import TEMPORARY_PREFIX
from storage.model_files.families import family_named
from storage.model_files.model_reading import AGAIN, raw_config, read_config, read_tokenizer, refusing
from storage.model_files.output_head import has_other_head
from storage.model_files.packed_files import named_templates
from storage.model_files.text_model import text_alone
from storage.model_files.weight_files import INDEX_FILE, SINGLE_FILE, weight_files

SHARD_BYTES = 5 * 10**9
"""Largest size of one file of weights, unless a single tensor is larger."""
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""torch's dtypes of weights by their names in safetensors files."""
STORED_DTYPES = DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8,
}  # fmt: skip
"""The same of all that files may hold: codes and scales of quantised weights too, and integers."""


class HFWeights(LazyWeights):
    """The safetensors files of a directory, one or an index of several."""

    def __init__(self, directory: Path, dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
        """Read the headers. Raises `ConfigError` when files are missing or torn. `dtypes` are those that the
        reader of these weights understands."""
        self._dtypes = dtypes
        self._file_of: dict[str, Path] = {}
        self._kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shapes and names of dtypes: to open a file for each costs as long as its header."""
        for file in (directory / name for name in weight_files(directory)):
            with _opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118  # no dictionary
                    found = opened.get_slice(name)
                    self._file_of[name] = file
                    self._kinds[name] = tuple(found.get_shape()), found.get_dtype()
        super().__init__(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        with _opened(self._file_of[name]) as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def part(self, name: str, dimension: int, start: int, stop: int) -> Tensor:
        with _opened(self._file_of[name]) as opened:
            part: Tensor = opened.get_slice(name)[(*[slice(None)] * dimension, slice(start, stop))]
            return part

    def spec(self, name: str) -> Spec:
        """Return shape and dtype; raises `ConfigError` for a dtype that weights do not have."""
        shape, dtype = self._kinds[name]
        if dtype not in self._dtypes:
            known = ", ".join(self._dtypes)
            raise ConfigError(
                f"{self._file_of[name]}: {name} is {dtype}, not one of {known}: take the model that is not "
                "quantised, or try `launch convert dequantise`"
            )
        return Spec(shape, self._dtypes[dtype])


def load_hf_config(path: Path) -> PretrainedConfig:
    """Read `config.json` as `load_whole_config` does; of a multimodal model that is not trained as a whole,
    the text model's part, with what its file says there and transformers leaves out, which engines read."""
    config = load_whole_config(path)
    with refusing(f"cannot read {path / 'config.json'}", AGAIN):
        text = text_alone(config)
        for name, value in raw_config(path).get("text_config", {}).items() if text is not config else ():
            if not hasattr(text, name):
                setattr(text, name, value)
        return text


def load_whole_config(path: Path) -> PretrainedConfig:
    """Read `config.json`; programs in the directory are not run. It ties no output layer to the embedding
    where the files have another one, which is what transformers takes.

    Raises `ConfigError` when it is missing or unreadable, or of a model that can be converted only."""
    try:
        config = read_config(path)
    except ConfigError as error:
        model_type = raw_config(path).get("model_type")
        if kind := family_named(model_type).published_as:
            raise ConfigError(
                f"{path} is a {model_type}, which transformers does not know: make a "
                f"{kind} of it by `launch convert hf-to-megatron {path} TARGET`, and give "
                "--model.path TARGET"
            ) from error
        raise
    if has_other_head(path):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    return config


def has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in TOKENIZER_FILES if name.startswith("tokenizer"))


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer. Raises `ConfigError` when it is not there: transformers would make one up."""
    if not has_tokenizer(path):
        raise ConfigError(f"{path} has no tokenizer: it needs tokenizer.json or tokenizer.model")
    return read_tokenizer(path)


def other_tokens(directory: Path, model_directory: Path) -> list[str]:
    """Return the tokens of `model_directory` that have another id in `directory`; none where that has no
    tokenizer."""
    if directory == model_directory or not has_tokenizer(directory):
        return []
    ours, theirs = (load_tokenizer(path).get_vocab() for path in (model_directory, directory))
    return sorted(token for token, number in ours.items() if theirs.get(token) != number)


def refuse_other_vocabulary(
    hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Raise `ConfigError` when the tokenizer of `directory` has tokens that the model does not embed.

    Tokens may have been added to it that nobody needs, such as that of images in the text models of Gemma 3:
    a prompt with one is refused where it is read."""
    embedded = hf_config.get_text_config().vocab_size
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= embedded}
    if not beyond:
        return
    there = f"{directory}: the tokenizer has {max(beyond.values()) + 1} tokens, the model embeds {embedded}"
    if not tokenizer.added_tokens_decoder.keys() >= set(beyond.values()):
        raise ConfigError(
            f"{there}: they do not belong together; put the tokenizer's files of this model there"
        )
    written = "".join(ChatTemplate(tokenizer).examples()) + str(tokenizer.eos_token)
    if used := [token for token in beyond if token in written]:
        raise ConfigError(
            f"{there}, and {used[0]!r}, which chats are written with, is none of these: put the tokenizer's "
            "files of this model there, or save the model with more embeddings (resize_token_embeddings)"
        )


def tokenizer_directory(hf_config: PretrainedConfig, *directories: Path | None) -> Path | None:
    """Return the first of these directories that has a tokenizer. Raises `ConfigError` where it has tokens
    that the model does not embed."""
    found = next((each for each in directories if each is not None and has_tokenizer(each)), None)
    if found is not None:
        refuse_other_vocabulary(hf_config, load_tokenizer(found), found)
    return found


def save_hf_directory(
    path: Path,
    hf_config: PretrainedConfig,
    state: State,
    tokenizer_dir: Path | None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` and inference engines load. One tensor of
    `state` is in memory at a time. A file has at most `shard_bytes`, or one tensor."""
    path.mkdir(parents=True, exist_ok=True)
    hf_config.save_pretrained(path)
    save_weights(path, state, shard_bytes=shard_bytes)
    if tokenizer_dir is not None:
        copy_tokenizer(tokenizer_dir, path)


def save_weights(path: Path, state: State, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the safetensors files of a directory, and their index where there are several, as
    `save_hf_directory` does."""
    specs = {name: spec_of(state, name) for name in state}
    shards = _split(specs, shard_bytes)
    for file, names in shards.items():
        _write_safetensors(path / file, {name: specs[name] for name in names}, state)
    if len(shards) > 1:
        _write_index(path, {file: {name: specs[name] for name in names} for file, names in shards.items()})


def stream_hf_directory(
    path: Path,
    hf_config: PretrainedConfig,
    weights: Iterable[tuple[str, Tensor]],
    tokenizer_dir: Path | None,
    *,
    tensors: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write what `save_hf_directory` writes, from weights that come one after another.

    No more than `shard_bytes` of them, or one tensor, are in the host's memory at a time. `tensors` is their
    number, where it is known."""
    path.mkdir(parents=True, exist_ok=True)
    hf_config.save_pretrained(path)
    shards: list[dict[str, Spec]] = []
    held: dict[str, Tensor] = {}

    def write() -> None:
        specs = {name: spec_of(held, name) for name in held}
        _write_safetensors(path / _unnamed(len(shards)), specs, held)
        shards.append(specs)
        held.clear()

    for name, weight in tracked(weights, "exporting the model", tensors):
        if held and sum(one.nbytes for one in held.values()) + weight.nbytes > shard_bytes:
            write()
        held[name] = weight.detach().to("cpu", copy=True).contiguous()
    write()
    names = [SINGLE_FILE] if len(shards) == 1 else [_shard_file(n, len(shards)) for n in range(len(shards))]
    for number, name in enumerate(names):
        (path / _unnamed(number)).rename(path / name)
    if len(shards) > 1:
        _write_index(path, dict(zip(names, shards, strict=True)))
    if tokenizer_dir is not None:
        copy_tokenizer(tokenizer_dir, path)


def _unnamed(number: int) -> str:
    return f"{TEMPORARY_PREFIX}{number}.safetensors"


def _shard_file(number: int, shards: int) -> str:
    return f"model-{number + 1:05}-of-{shards:05}.safetensors"


def _write_index(path: Path, shards: Mapping[str, Mapping[str, Spec]]) -> None:
    total = sum(spec.size_bytes for specs in shards.values() for spec in specs.values())
    file_of = {name: file for file, specs in shards.items() for name in specs}
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (path / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def copy_tokenizer(source: Path, target: Path, *, without: Container[str] = ()) -> None:
    """Copy the tokenizer, all its chat templates, and what else there is of `TOKENIZER_FILES`."""
    for file in (
        *(source / name for name in TOKENIZER_FILES if name not in without),
        *named_templates(source),
    ):
        if file.is_file():
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def _split(specs: Mapping[str, Spec], shard_bytes: int) -> dict[str, list[str]]:
    shards: list[list[str]] = []
    filled = 0
    for name, spec in specs.items():
        if not shards or filled + spec.size_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.size_bytes
    if len(shards) <= 1:
        return {SINGLE_FILE: [name for names in shards for name in names]}
    return {_shard_file(number, len(shards)): names for number, names in enumerate(shards)}


def _write_safetensors(file: Path, specs: Mapping[str, Spec], state: State) -> None:
    """Write tensor by tensor. The safetensors library would need all tensors in memory at once."""
    named = {dtype: name for name, dtype in STORED_DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in specs.items():
        start, end = end, end + spec.size_bytes
        header[name] = {"dtype": named[spec.dtype], "shape": spec.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as opened:
        opened.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in specs:
            opened.write(tensor_bytes(state[name]))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read {file}: it is missing, and {INDEX_FILE} names it: {AGAIN}") from error
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {file}: it is damaged ({error}): {AGAIN}") from error
