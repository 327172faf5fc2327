"""`launch convert`: whole directories, tensor by tensor, so that the model may be larger than memory."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from bus.errors import ConfigError, StorageError
from bus.work_progress import Advance, long_work, tracked, uncounted
from learner.backends.megatron.checkpoint.fingerprint import fingerprint
from learner.backends.megatron.conversion.base import OUTPUT, Rule, Shape
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.conversion.published import BlockScaledWeights, load_published
from learner.backends.megatron.conversion.torch_dist import MegatronWeights, write_tensors
from learner.backends.megatron.core import CheckpointingConfig, save_config
from learner.backends.megatron.model.requirements import unsupported
from learner.checkpoint.manifest import (
    MANIFEST,
    damaged_files,
    differences,
    read_manifest,
    refuse_damage,
    refuse_other_model,
    write_manifest,
)
from learner.lazy_weights import LazyWeights, Spec, main_dtype, tensor_digest
from learner.model_directory import (
    SHARD_BYTES,
    HFWeights,
    copy_tokenizer,
    has_tokenizer,
    load_hf_config,
    load_tokenizer,
    refuse_other_vocabulary,
    save_hf_directory,
)
from storage.disk import checkpoints
from storage.disk.atomic_files import make_directory, publish, temporary_sibling


@dataclass(frozen=True)
class Converted:
    """Account of what was written and read back."""

    directory: Path
    tensors: int
    size_bytes: int
    left_out: int = 0
    """Tensors of the source that are no part of what is trained."""

    def __str__(self) -> str:
        without = f", {self.left_out} of heads for several next tokens left out" if self.left_out else ""
        written = f"{self.tensors} tensors, {self.size_bytes / 1e9:.3f} GB, verified"
        return f"wrote {self.directory}: {written}{without}"


def hf_to_megatron(source: Path, target: Path) -> Converted:
    """Write a Hugging Face directory as a checkpoint of weights only, which `--model.path` takes.

    Raises `ConfigError` for a model that cannot be trained, or weights or a tokenizer that are not its own;
    then, and after any other failure, there is no `target`.
    """
    _refuse_existing(target)
    hf_config, state = load_published(source)
    _refuse_unsupported(hf_config)
    if not isinstance(state, (HFWeights, BlockScaledWeights)):
        raise ConfigError(f"{source} is a checkpoint of megatron-core already")
    if has_tokenizer(source):
        refuse_other_vocabulary(hf_config, load_tokenizer(source), source)
    _refuse_misfits(source, hf_config, state)
    shape = shape_of(hf_config)
    rules = {rule.megatron: rule for rule in family_of(hf_config).rules(shape)}
    seen = _Digesting(state)
    specs = {name: _whole(rule, shape, state) for name, rule in rules.items()}

    def make(name: str) -> Tensor:
        rule = rules[name]
        return rule.layout.merge([seen[part] for part in rule.parts], shape)

    with _publishing(target) as temporary:
        with seen.shown(f"converting {source}"):
            write_tensors(temporary, specs, make)
        torch.save({}, temporary / "common.pt")
        save_config(CheckpointingConfig("torch_dist", 1), str(temporary))
        hf_config.save_pretrained(temporary)
        copy_tokenizer(source, temporary)
        size_bytes = _verify(MegatronWeights(temporary, list(rules.values()), shape), seen.digests)
        write_manifest(temporary, model=fingerprint(hf_config), training=None, extra={}, digests={})
    left_out = sum(map(family_of(hf_config).left_out, state))
    return Converted(target, len(seen.digests), size_bytes, left_out)


def megatron_to_hf(
    source: Path, target: Path, model: Path | None = None, *, shard_bytes: int = SHARD_BYTES
) -> Converted:
    """Write the weights of a checkpoint as a Hugging Face directory.

    Args:
        source: a checkpoint, or a directory of several, of which the newest is taken.
        target: must not exist yet.
        model: Hugging Face directory whose configuration and tokenizer go along; without it those that
            lie in `source`.
        shard_bytes: largest size of one file of weights.

    Raises `StorageError` for a damaged checkpoint, `ConfigError` for a configuration or a tokenizer that is
    not its own; then, and after any other failure, there is no `target`.
    """
    _refuse_existing(target)
    if not (source / MANIFEST).is_file():
        source = checkpoints.latest(source) or source
    manifest = read_manifest(source)
    described = model or source
    hf_config = load_hf_config(described)
    _refuse_unsupported(hf_config)
    refuse_other_model(source, differences(manifest["model"], fingerprint(hf_config)))
    tokenizer_dir = described if has_tokenizer(described) else None
    if tokenizer_dir is not None:
        refuse_other_vocabulary(hf_config, load_tokenizer(tokenizer_dir), tokenizer_dir)
    refuse_damage(source, damaged_files(source, manifest, manifest["files"]))
    shape = shape_of(hf_config)
    seen = _Digesting(MegatronWeights(source, list(family_of(hf_config).rules(shape)), shape))
    hf_config.dtype = main_dtype(map(seen.spec, seen))  # every tensor is written in its own
    with _publishing(target) as temporary:
        with seen.shown(f"converting {source}"):
            save_hf_directory(temporary, hf_config, seen, tokenizer_dir, shard_bytes=shard_bytes)
        size_bytes = _verify(HFWeights(temporary), seen.digests)
    return Converted(target, len(seen.digests), size_bytes)


class _Digesting(LazyWeights):
    """Notes the digest of every tensor that is read."""

    def __init__(self, weights: LazyWeights) -> None:
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

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def spec(self, name: str) -> Spec:
        return self._weights.spec(name)


def _verify(written: LazyWeights, digests: Mapping[str, str]) -> int:
    """Read everything back, and return its size in bytes. Raises `StorageError` where a bit differs."""
    reading = tracked(digests.items(), "reading back what was written")
    if differing := [name for name, digest in reading if tensor_digest(written[name]) != digest]:
        raise StorageError(
            f"what was written reads back otherwise: {', '.join(differing)}; is the disk sound?"
        )
    return sum(written.spec(name).size_bytes for name in digests)


def _whole(rule: Rule, shape: Shape, state: LazyWeights) -> Spec:
    """Return shape and dtype of the tensor that the parts will be merged to."""
    specs = [state.spec(part) for part in rule.parts]
    if len({spec.dtype for spec in specs}) > 1:
        raise ConfigError(f"{', '.join(rule.parts)} are of different dtypes: {[str(s.dtype) for s in specs]}")
    parts = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs]
    return Spec(tuple(rule.layout.merge(parts, shape).shape), specs[0].dtype)


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise ConfigError(f"{target} exists already: remove it, or choose another")


def _refuse_unsupported(hf_config: PretrainedConfig) -> None:
    if problems := unsupported(hf_config):
        raise ConfigError("cannot convert this model:\n" + "\n".join(f"- {problem}" for problem in problems))


def _refuse_misfits(source: Path, hf_config: PretrainedConfig, state: LazyWeights) -> None:
    """Compare with what transformers itself would save for this configuration."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    expected = {name: t.shape for name, t in revert_weight_conversion(model, model.state_dict()).items()}
    if hf_config.tie_word_embeddings:
        expected = {name: size for name, size in expected.items() if name not in OUTPUT.parts}
    problems = [f"missing {name} {list(size)}" for name, size in expected.items() if name not in state]
    ignored = (*OUTPUT.parts,) if hf_config.tie_word_embeddings else ()
    left_out = family_of(hf_config).left_out
    problems += [
        f"unexpected {name}"
        for name in state
        if name not in expected
        and name not in ignored
        and not name.endswith("rotary_emb.inv_freq")
        and not left_out(name)
    ]
    problems += [
        f"{name} is {list(state.spec(name).shape)}, not {list(size)}"
        for name, size in expected.items()
        if name in state and state.spec(name).shape != tuple(size)
    ]
    if problems:
        raise ConfigError(
            f"the weights in {source} do not fit its config.json:\n" + "\n".join(f"- {p}" for p in problems)
        )


@contextmanager
def _publishing(target: Path) -> Iterator[Path]:
    """Give a directory to fill; it becomes `target` at the end, or nothing is left of it."""
    temporary = temporary_sibling(target)
    make_directory(target.absolute().parent)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        publish(temporary, target)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
