"""`launch convert fsdp-to-hf`: a checkpoint of this backend becomes a model directory."""

from pathlib import Path

from bus.errors import ConfigError
from learner.backends.fsdp.checkpoint_weights import CheckpointWeights
from learner.backends.fsdp.fingerprint import fingerprint
from learner.convert.written_directory import (
    Converted,
    Digesting,
    filling,
    refuse_existing,
    verified_size,
)
from learner.model_directories.checkpoint_manifest import (
    MANIFEST,
    damaged_files,
    differences,
    read_manifest,
    refuse_damage,
    refuse_other_model,
    written_by,
)
from learner.model_directories.lazy_weights import main_dtype
from learner.model_directories.model_directory import (
    SHARD_BYTES,
    HFWeights,
    load_hf_config,
    save_hf_directory,
    tokenizer_directory,
)
from storage.disk import checkpoints


def fsdp_to_hf(
    source: Path, target: Path, model: Path | None = None, *,
    begun_from: Path | None = None, shard_bytes: int = SHARD_BYTES,
) -> Converted:  # fmt: skip
    """Write the main weights of a checkpoint, bit for bit, as a Hugging Face directory.

    Args:
        source: a checkpoint, or a directory of several, of which the newest is taken.
        target: must not exist yet.
        model: directory whose configuration and tokenizer go along; without it those in `source`.
        begun_from: directory of the model that the checkpoint's run began with, whose tokenizer goes along
            where `source` has none.
        shard_bytes: largest size of one file of weights.

    Raises `StorageError` for a damaged checkpoint, `ConfigError` for one of adapters alone or of another
    backend, and for a configuration or a tokenizer that is not its own; then, and after any other failure,
    there is no `target`.
    """
    refuse_existing(target)
    if not (source / MANIFEST).is_file():
        source = checkpoints.latest(source) or source
    manifest = read_manifest(source)
    if written_by(manifest) != "fsdp":
        raise ConfigError(f"checkpoint {source} is Megatron's: convert it by `launch convert megatron-to-hf`")
    described = model or source
    hf_config = load_hf_config(described)
    # both as this transformers reads them, which may be newer than the checkpoint's
    refuse_other_model(source, differences(fingerprint(load_hf_config(source)), fingerprint(hf_config)))
    tokenizer_dir = tokenizer_directory(hf_config, described, begun_from)
    refuse_damage(source, damaged_files(source, manifest, manifest["files"]))
    seen = Digesting(CheckpointWeights(source, hf_config))
    hf_config.dtype = main_dtype(map(seen.spec, seen))
    with filling(target) as temporary:
        with seen.shown(f"converting {source}"):
            save_hf_directory(temporary, hf_config, seen, tokenizer_dir, shard_bytes=shard_bytes)
        size_bytes = verified_size(HFWeights(temporary), seen.digests)
    return Converted(target, len(seen.digests), size_bytes)
