"""`launch convert fsdp-to-hf`: a checkpoint of this backend becomes a model directory."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from learner.backends.fsdp.checkpoint_weights import CheckpointWeights
from learner.backends.fsdp.fingerprint import fingerprint
from learner.convert.written_directory import Checkpoints, checkpoint_to_hf
from learner.model_directories.checkpoint_manifest import differences
from learner.model_directories.model_directory import load_hf_config


def _differences(source: Path, _: Mapping[str, Any], hf_config: PretrainedConfig) -> list[str]:
    """Compare both as this transformers reads them, which may be newer than the checkpoint's."""
    return differences(fingerprint(load_hf_config(source)), fingerprint(hf_config))


fsdp_to_hf = partial(
    checkpoint_to_hf,
    Checkpoints("fsdp", _differences, lambda source, hf_config, _: CheckpointWeights(source, hf_config)),
)
