"""Whether a backend trains a model, by its configuration and the names of its weights, which are not read."""

from pathlib import Path

from transformers import PretrainedConfig

from bus.errors import ConfigError, listed
from learner.backends.megatron.conversion.families import shape_of
from learner.backends.megatron.model.model import unsuitable
from learner.backends.megatron.model.requirements import unsupported
from learner.backends.megatron.weights.rank_weights import refuse_misfits
from learner.backends.megatron.weights.torch_dist import is_checkpoint
from learner.config.backend import BackendName
from learner.config.model import ModelConfig
from learner.config.mtp import MtpConfig
from learner.config.parallel import ParallelConfig
from learner.model_directories.dtypes import compute_dtype
from learner.model_directories.lazy_weights import LazyWeights, State, misfits
from storage.model_files.model_reading import refusing


def refuse_untrainable(
    model: ModelConfig, backend: BackendName, hf_config: PretrainedConfig, parallel: ParallelConfig
) -> None:
    """Raise `ConfigError` for a model that the backend does not train, naming the one that does, and for one
    that cannot be divided among ranks as `parallel` says."""
    dtype = compute_dtype(model)
    if problem := _untrained(backend, hf_config):
        other: BackendName = "fsdp" if backend == "megatron" else "megatron"
        trains = "" if _untrained(other, hf_config) else f"\nlearner.backend={other} trains this model"
        raise ConfigError(problem + trains)
    if backend == "megatron" and (problems := unsuitable(hf_config, dtype, parallel)):
        raise ConfigError(f"cannot train this model:\n{listed(problems)}")


def trains(backend: BackendName, hf_config: PretrainedConfig) -> bool:
    return not _untrained(backend, hf_config)


def _untrained(backend: BackendName, hf_config: PretrainedConfig) -> str:
    """Return why a backend does not train a model of this configuration; nothing where it does."""
    try:
        with refusing(f"learner.backend={backend} cannot train this model", "choose another model"):
            if backend == "megatron":
                if problems := unsupported(hf_config):
                    return f"learner.backend=megatron cannot train this model:\n{listed(problems)}"
                shape_of(hf_config)
            else:
                from learner.backends.fsdp.names import FileNames  # like the trainer above

                FileNames(hf_config)
    except ConfigError as error:
        return str(error)
    return ""


def refuse_other_weights(
    directory: Path, hf_config: PretrainedConfig, state: State, backend: BackendName, mtp: MtpConfig
) -> None:
    """Raise `ConfigError` for weights of a directory that are not those of its configuration."""
    if is_checkpoint(directory) or not isinstance(state, LazyWeights):
        return  # a manifest describes it, or it was made here
    if backend == "fsdp":
        from learner.backends.fsdp.names import FileNames  # like the trainer above

        names = FileNames(hf_config)
        if problems := list(misfits(names.files, state, names.is_ignored)):
            raise ConfigError(f"the weights in {directory} do not fit its config.json:\n{listed(problems)}")
    elif not mtp.exists:  # whose head's weights are beside the model's
        refuse_misfits(directory, hf_config, state)
