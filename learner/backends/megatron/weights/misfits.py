"""Whether the weights of files are those of a configuration."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from bus.errors import ConfigError, listed
from learner.backends.megatron.conversion.base import OUTPUT
from learner.backends.megatron.conversion.families import family_of
from learner.backends.shared.score_head import is_reward_model
from learner.model_directories.lazy_weights import LazyWeights, SomeWeights, State, misfits
from learner.model_directories.text_model import saved_shapes


def weights_beside(hf_config: PretrainedConfig, state: State) -> SomeWeights:
    """Return the weights of `state` that are beside the model."""
    beside = family_of(hf_config).beside
    return SomeWeights(state, [name for name in state if beside(name)])


def without_beside(hf_config: PretrainedConfig, state: State) -> SomeWeights:
    """Return the weights of `state` that are of the model."""
    beside = family_of(hf_config).beside
    return SomeWeights(state, [name for name in state if not beside(name)])


def refuse_misfits(source: Path, hf_config: PretrainedConfig, state: LazyWeights) -> None:
    """Raise `ConfigError` for weights that are not those which transformers would save for this
    configuration."""
    form = AutoModelForSequenceClassification if is_reward_model(hf_config) else AutoModelForCausalLM
    beside = family_of(hf_config).beside
    found = misfits(
        saved_shapes(hf_config, form), state, lambda name: beside(name) or says_nothing_new(name, hf_config)
    )
    if problems := list(found):
        raise ConfigError(f"the weights in {source} do not fit its config.json:\n{listed(problems)}")


def says_nothing_new(name: str, hf_config: PretrainedConfig) -> bool:
    """Tell a tied output layer, and a buffer of old Llama files, from what a model may not have."""
    tied = hf_config.tie_word_embeddings and name in OUTPUT.parts
    return tied or name.endswith("rotary_emb.inv_freq")
