"""Whether the weights of files are those of a configuration."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from bus.errors import ConfigError, listed
from learner.backends.megatron.conversion.base import OUTPUT
from learner.backends.megatron.conversion.families import family_of
from learner.backends.shared.score_head import is_reward_model
from learner.model_directories.lazy_weights import LazyWeights, SomeWeights, State


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
    with torch.device("meta"):
        form = AutoModelForSequenceClassification if is_reward_model(hf_config) else AutoModelForCausalLM
        model = form.from_config(hf_config)
    expected = {name: t.shape for name, t in revert_weight_conversion(model, model.state_dict()).items()}
    if hf_config.tie_word_embeddings:
        expected = {name: size for name, size in expected.items() if name not in OUTPUT.parts}
    missing = [f"missing {name} {list(size)}" for name, size in expected.items() if name not in state]
    ignored = (*OUTPUT.parts,) if hf_config.tie_word_embeddings else ()
    beside = family_of(hf_config).beside
    unexpected = [
        f"unexpected {name}"
        for name in state
        if name not in expected
        and name not in ignored
        and not name.endswith("rotary_emb.inv_freq")
        and not beside(name)
    ]
    others = [
        f"{name} is {list(state.spec(name).shape)}, not {list(size)}"
        for name, size in expected.items()
        if name in state and state.spec(name).shape != tuple(size)
    ]
    if problems := [listed(of_kind, 6) for of_kind in (missing, unexpected, others) if of_kind]:
        raise ConfigError(f"the weights in {source} do not fit its config.json:\n" + "\n".join(problems))
