"""`launch convert quantise` and `dequantise`: model directories in fp8 or int4 and back, and out of MXFP4,
tensor by tensor."""

import json
import shutil
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import torch

from bus.codec import Json
from bus.errors import ConfigError
from bus.process.host_limits import usable_cores
from learner.convert.written_directory import Converted, Digesting, refuse_existing, verified_size
from learner.model_directories.lazy_weights import LazyWeights
from learner.model_directories.model_directory import (
    SHARD_BYTES,
    STORED_DTYPES,
    HFWeights,
    copy_tokenizer,
    save_weights,
)
from learner.model_directories.quantised_weights import (
    MXFP4,
    DequantisedWeights,
    FromInt4Weights,
    FromMxfp4Weights,
    QuantisedWeights,
    blocks_of,
    group_size,
)
from storage.disk.atomic_files import filling
from storage.model_files.model_reading import AGAIN
from storage.model_files.packed_files import CONFIG, QUANTISATION
from storage.model_files.weight_files import INDEX_FILE
from storage.weights.fp8 import Blocks
from storage.weights.quantisation import CONVERTIBLE, FLOAT_LAYOUT, LAYOUT, METHOD, quantisation_config

WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"}
)


def quantise(source: Path, target: Path, to: str, *, shard_bytes: int = SHARD_BYTES) -> Converted:
    """Write a Hugging Face directory with its linear layers in one of `CONVERTIBLE`.

    Raises `ConfigError` for a model that is quantised already or has experts in one tensor, `StorageError`
    for a weight that is not finite; then, and after any other failure, there is no `target`."""
    refuse_existing(target)
    config = _config(source)
    if QUANTISATION in config:
        raise ConfigError(
            f"{source} is quantised already, by its {CONFIG}: `launch convert dequantise` undoes that"
        )
    weights = HFWeights(source, STORED_DTYPES)
    shapes = {name: weights.spec(name).shape for name in weights}
    config[QUANTISATION] = quantisation_config(CONVERTIBLE[to], shapes)
    with _threads() as threads:
        return _written(
            source, target, QuantisedWeights(weights, CONVERTIBLE[to], threads), config, shard_bytes
        )


def dequantise(
    source: Path, target: Path, dtype: torch.dtype, *, shard_bytes: int = SHARD_BYTES
) -> Converted:
    """Write a Hugging Face directory in fp8, int4 or MXFP4 as one with those weights in `dtype`.

    Raises `ConfigError` for a model that is quantised otherwise or not at all, `StorageError` for weights or
    scales that are damaged; then, and after any other failure, there is no `target`."""
    refuse_existing(target)
    config = _config(source)
    found = config.pop(QUANTISATION, None)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    with _threads() as threads:
        return _written(source, target, _undone(source, found, dtype, threads), config, shard_bytes)


def _threads() -> ThreadPoolExecutor:
    """Return one thread for each core that this process has: it does nothing else."""
    return ThreadPoolExecutor(usable_cores(), "convert")


def _written(
    source: Path, target: Path, weights: LazyWeights, config: dict[str, Json], shard_bytes: int
) -> Converted:
    seen = Digesting(weights)
    with filling(target) as temporary:
        for file in source.iterdir():
            if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and file.name != INDEX_FILE:
                shutil.copyfile(file, temporary / file.name)
        copy_tokenizer(source, temporary)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        with seen.shown(f"converting {source}"):
            save_weights(temporary, seen, shard_bytes=shard_bytes)
        size_bytes = verified_size(HFWeights(temporary, STORED_DTYPES), seen.digests)
    return Converted(target, len(seen.digests), size_bytes)


def _config(source: Path) -> dict[str, Json]:
    try:
        config = json.loads((source / CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source} is not a model directory: cannot read {CONFIG}: {error}: {AGAIN}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{source / CONFIG} is no configuration: it is no JSON object: {AGAIN}")
    return config


def _undone(source: Path, found: Json, dtype: torch.dtype, threads: Executor) -> LazyWeights:
    stored = HFWeights(source, STORED_DTYPES)
    if isinstance(found, dict) and found.get("quant_method") == MXFP4:
        return FromMxfp4Weights(stored, dtype)
    if not isinstance(found, dict) or found.get("quant_method") != METHOD:
        return DequantisedWeights(stored, _blocks(source, found), dtype, threads)
    if found.get("format") == FLOAT_LAYOUT:
        return DequantisedWeights(stored, None, dtype, threads)
    size = group_size(found)
    if size is None:
        raise ConfigError(
            f"{source} is quantised by {METHOD} in another way than {FLOAT_LAYOUT}, and than {LAYOUT} with 4 "
            "bits, symmetric, in groups of columns in their order (no actorder): these can be converted"
        )
    return FromInt4Weights(stored, size, dtype, threads)


def _blocks(source: Path, found: Json) -> Blocks | None:
    """Return which elements share a scale; None where a tensor or a row has one."""
    method = found.get("quant_method") if isinstance(found, dict) else None
    if not isinstance(found, dict) or method != "fp8":
        how = f"by {method!r}" if method else "by nothing that it names"
        raise ConfigError(
            f"{source} is quantised {how} in its {CONFIG}: 'fp8', '{MXFP4}' and '{METHOD}' can be converted"
        )
    return blocks_of(source / CONFIG, found.get("weight_block_size"))
