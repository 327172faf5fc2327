"""`launch convert text-model`: a directory of the text model inside a multimodal one."""

from pathlib import Path

from bus.errors import ConfigError
from learner.convert.written_directory import Converted, Digesting, refuse_existing, verified_size
from learner.model_directories.model_directory import (
    STORED_DTYPES,
    HFWeights,
    copy_tokenizer,
    load_hf_config,
    save_weights,
)
from learner.model_directories.text_model import refuse_other_tensors, text_weights
from storage.disk.atomic_files import filling
from storage.model_files.model_reading import raw_config

OF_IMAGES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def convert_text_model(source: Path, target: Path) -> Converted:
    """Write the text model of a multimodal directory as one of its own, tensor by tensor.

    Weights that are quantised stay so. Raises `ConfigError` for a model of text alone, for one without a text
    model that transformers builds alone, and for tensors that are missing or of another shape, `StorageError`
    for what reads back otherwise; then there is no `target`."""
    refuse_existing(target)
    kind, text = raw_config(source).get("model_type"), load_hf_config(source)
    if text.model_type == kind:
        alone = text.get_text_config() is text
        why = "is of text alone" if alone else "has no text model that transformers builds without the rest"
        raise ConfigError(f"{source}, a {kind}, {why}: there is nothing to convert")
    weights = text_weights(HFWeights(source, STORED_DTYPES), text)
    if getattr(text, "quantization_config", None) is None:
        refuse_other_tensors(source, text, weights)
    seen = Digesting(weights)
    with filling(target) as temporary:
        text.save_pretrained(temporary)
        copy_tokenizer(source, temporary, without=OF_IMAGES)
        with seen.shown(f"writing {target}"):
            save_weights(temporary, seen)
        size_bytes = verified_size(HFWeights(temporary, STORED_DTYPES), seen.digests)
    return Converted(target, len(seen.digests), size_bytes)
