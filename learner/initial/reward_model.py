"""Makes of a language model one that gives an answer a score, in transformers' form of a classifier."""

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedTokenizerBase

from bus.errors import ConfigError
from learner.backends.shared.score_head import SCORE_HEAD, is_reward_model
from learner.model_directories.lazy_weights import JoinedWeights, LazyWeights, SomeWeights, Spec, State
from storage.chats.stop_tokens import answer_end

OUTPUT = "lm_head.weight"


def as_reward_model(
    hf_config: PretrainedConfig, state: State, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> tuple[PretrainedConfig, LazyWeights]:
    """Return configuration and weights with a scalar head in place of the output layer; a head that is there
    stays. Raises `ConfigError` for a model of which transformers has no such form."""
    try:
        form = AutoModelForSequenceClassification._model_mapping[type(hf_config)]
    except KeyError as error:
        raise ConfigError(
            f"warmup.loss.type=reward_model: transformers has no sequence classification of a "
            f"{hf_config.model_type}: choose another model"
        ) from error
    config = copy.deepcopy(hf_config)
    config.architectures, config.num_labels = [form.__name__], 1
    if config.pad_token_id is None:  # by which transformers finds the last token of padded answers
        pad = tokenizer.pad_token_id
        config.pad_token_id = answer_end(tokenizer) if pad is None else pad
    body: LazyWeights = SomeWeights(state, [name for name in state if name != OUTPUT])
    width, spread = hf_config.hidden_size, getattr(hf_config, "initializer_range", 0.02)
    drawn = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) * spread
    return config, JoinedWeights(body, _Head(drawn))


def refuse_reward_model(directory: Path, hf_config: PretrainedConfig, exported: Path) -> None:
    """Raise `ConfigError` for a reward model where a policy is to be trained; `exported` is where a reward is
    read from."""
    if is_reward_model(hf_config):
        raise ConfigError(
            f"{directory} is a reward model, whose output is a score and no token: begin with the model that "
            "it was made of. It rewards answers with --reward reward_model "
            f"--actors.environment.reward-model.path {exported}"
        )


class _Head(LazyWeights):
    def __init__(self, weight: Tensor) -> None:
        super().__init__([SCORE_HEAD])
        self._weight = weight

    def __getitem__(self, name: str) -> Tensor:
        return {SCORE_HEAD: self._weight}[name]

    def spec(self, name: str) -> Spec:
        """Return shape and dtype."""
        return Spec(tuple(self[name].shape), self[name].dtype)
