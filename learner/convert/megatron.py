"""`launch convert`: whole directories, tensor by tensor, so that the model may be larger than memory."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

from bus.codec import Json
from bus.errors import ConfigError
from learner.backends.megatron.conversion.base import EMBEDDING, OUTPUT, Rule, Shape, as_it_came, nothing
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.core.megatron_core import CheckpointingConfig, save_config
from learner.backends.megatron.fingerprint import differences_from, fingerprint
from learner.backends.megatron.model.requirements import unsupported
from learner.backends.megatron.weights.rank_weights import refuse_misfits, weights_beside
from learner.backends.megatron.weights.stacks import stacks_of, unstacked
from learner.backends.megatron.weights.torch_dist import (
    MegatronWeights,
    is_checkpoint,
    model_in,
    write_tensors,
)
from learner.backends.model_loading import load_hf_directory
from learner.convert.written_directory import (
    Checkpoints,
    Converted,
    Digesting,
    checkpoint_to_hf,
    refuse_existing,
    verified_size,
)
from learner.model_directories.checkpoint_manifest import write_manifest
from learner.model_directories.lazy_weights import LazyWeights, Spec, joined_weights, renamed_weights
from learner.model_directories.model_directory import (
    STORED_DTYPES,
    HFWeights,
    copy_tokenizer,
    tokenizer_directory,
)
from learner.model_directories.quantised_weights import DequantisedWeights, blocks_of
from storage.disk.atomic_files import filling
from storage.model_files.families import family_named
from storage.model_files.model_reading import AGAIN, raw_config, refusing
from storage.weights.fp8 import Blocks


def load_published(directory: Path) -> tuple[PretrainedConfig, LazyWeights]:
    """Read a model directory; weights in fp8 with a scale for each block are read as bfloat16. Raises
    `ConfigError` as `load_hf_directory` does, and for scales that do not fit their weights."""
    raw = raw_config(directory)
    model_type = str(raw.get("model_type"))
    block = _block_of(directory / "config.json", raw.get("quantization_config"))
    published_as = family_named(model_type).published_as
    if not published_as and block is None:
        return load_hf_directory(directory)
    kind = published_as or model_type
    left_out = ("auto_map", *(("quantization_config",) if block else ()))
    known = {name: value for name, value in raw.items() if name not in left_out}
    with refusing(f"cannot read {directory / 'config.json'}", AGAIN):
        hf_config = CONFIG_MAPPING[kind].from_dict({**known, "model_type": kind})
    if block is None:
        return hf_config, HFWeights(directory)
    return hf_config, DequantisedWeights(HFWeights(directory, STORED_DTYPES), block, torch.bfloat16)


def _block_of(config: Path, quantized: Json) -> Blocks | None:
    """Return which elements share a scale; None for weights that are not such."""
    if not isinstance(quantized, dict | None):
        raise ConfigError(f"{config}: quantization_config={quantized!r} is no object of settings")
    if quantized is None or quantized.get("quant_method") != "fp8":
        return None
    return blocks_of(config, quantized.get("weight_block_size"))


def hf_to_megatron(source: Path, target: Path) -> Converted:
    """Write a Hugging Face directory as a checkpoint of weights only, which `--model.path` takes.

    Raises `ConfigError` for a model that cannot be trained, or weights or a tokenizer that are not its own;
    then, and after any other failure, there is no `target`."""
    refuse_existing(target)
    hf_config, state = load_published(source)
    _refuse_unsupported(hf_config)
    if is_checkpoint(source):
        raise ConfigError(f"{source} is a checkpoint of megatron-core already")
    tokenizer_directory(hf_config, source)
    refuse_misfits(source, hf_config, state)
    shape = shape_of(hf_config)
    seen = Digesting(_by_rule(state, hf_config))
    beside = list(filter(family_of(hf_config).beside, state))
    every_rule = [*family_of(hf_config).rules(shape), *map(as_it_came, beside)]
    rules = {rule.megatron: rule for rule in every_rule}
    specs = {name: _whole(rule, shape, seen) for name, rule in rules.items()}

    def make(name: str) -> Tensor:
        rule = rules[name]
        return rule.layout.merge([seen[part] for part in rule.parts], shape)

    with filling(target) as temporary:
        with seen.shown(f"converting {source}"):
            write_tensors(temporary, specs, make)
        with (temporary / "common.pt").open("wb") as file:  # by a path torch would not say why it cannot
            torch.save({}, file)
        save_config(CheckpointingConfig("torch_dist", 1), str(temporary))
        hf_config.save_pretrained(temporary)
        copy_tokenizer(source, temporary)
        size_bytes = verified_size(MegatronWeights(temporary, every_rule, shape), seen.digests)
        write_manifest(temporary, model=fingerprint(hf_config), training=None, extra={}, digests={})
    return Converted(target, len(seen.digests), size_bytes, len(beside))


def _differences(_: Path, manifest: Mapping[str, Any], hf_config: PretrainedConfig) -> list[str]:
    _refuse_unsupported(hf_config)
    return differences_from(manifest["model"], hf_config)


def _weights(source: Path, hf_config: PretrainedConfig, heads: Path | None) -> LazyWeights:
    weights = model_in(source, hf_config)
    if heads is None or family_of(hf_config).beside is nothing:
        return weights
    return _with_heads_of(heads, hf_config, weights)


megatron_to_hf = partial(
    checkpoint_to_hf,
    Checkpoints("megatron", _differences, _weights, lambda hf_config: family_of(hf_config).beside),
)


def _with_heads_of(model: Path, hf_config: PretrainedConfig, weights: LazyWeights) -> LazyWeights:
    """Return the weights, and heads for several next tokens from a model directory: the checkpoints of a run
    have none that it did not train, since they would be the same in all. Copies of the embedding and of the
    output layer beside a head that it trained are those of the run."""
    if not is_checkpoint(model) and not any(model.glob("*.safetensors")):
        return weights
    found = joined_weights(weights, weights_beside(hf_config, load_hf_directory(model)[1]))
    family, shape = family_of(hf_config), shape_of(hf_config)
    if not isinstance(weights, MegatronWeights) or not weights.has_trained_head:
        return found
    shared = {rule.megatron: rule.parts[0] for rule in (EMBEDDING, OUTPUT)}
    copies = {copy.parts[0]: shared[copy.megatron] for copy in family.head_copies(shape)}
    return renamed_weights(found, {name: copies.get(name, name) for name in found})


def _by_rule(state: LazyWeights, hf_config: PretrainedConfig) -> LazyWeights:
    found = unstacked(state, stacks_of(hf_config))
    assert isinstance(found, LazyWeights)
    return found


def _whole(rule: Rule, shape: Shape, state: LazyWeights) -> Spec:
    specs = [state.spec(part) for part in rule.parts]
    if len({spec.dtype for spec in specs}) > 1:
        raise ConfigError(f"{', '.join(rule.parts)} are of different dtypes: {[str(s.dtype) for s in specs]}")
    parts = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs]
    return Spec(tuple(rule.layout.merge(parts, shape).shape), specs[0].dtype)


def _refuse_unsupported(hf_config: PretrainedConfig) -> None:
    if problems := unsupported(hf_config):
        raise ConfigError("cannot convert this model:\n" + "\n".join(f"- {problem}" for problem in problems))
