"""Tells what a run trains from: its model directory, made where there is none, and its demonstrations."""

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedTokenizerBase

from bus.errors import ConfigError
from learner.backends.model_loading import load_hf_directory
from learner.backends.shared.score_head import SCORE_HEAD, is_reward_model
from learner.config.process_settings import LearnerSettings
from learner.data.demonstrations import Demonstrations
from learner.initial.scratch_model import ensure_model_directory
from learner.model_directories.lazy_weights import LazyWeights, SomeWeights, State, joined_weights
from learner.model_directories.model_directory import load_tokenizer, refuse_other_vocabulary
from learner.publication.whole_model import WholeModel
from storage.built_in_tasks.generators import load_demonstrations
from storage.chats.stop_tokens import answer_end
from storage.disk.atomic_files import one_at_a_time
from storage.images.chat import ImageChat
from storage.images.reader import ImageReader
from storage.model_files.model_reading import raw_config, refuse_no_template
from storage.prompt_files.pairs import load_pairs

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
    return config, joined_weights(body, {SCORE_HEAD: drawn})


def refuse_reward_model(directory: Path, hf_config: PretrainedConfig, exported: Path) -> None:
    """Raise `ConfigError` for a reward model where a policy is to be trained; `exported` is where a reward is
    read from."""
    if is_reward_model(hf_config):
        raise ConfigError(
            f"{directory} is a reward model, whose output is a score and no token: begin with the model that "
            "it was made of. It rewards answers with --reward reward_model "
            f"--actors.environment.reward-model.path {exported}"
        )


@dataclass(frozen=True)
class Initial:
    """Says what a run trains from, before its first step."""

    hf_config: PretrainedConfig
    state: State
    """Weights by Hugging Face name."""
    demonstrations: Demonstrations | None
    """Says what the warm-up trains on, if the run has one."""
    heldout_demonstrations: Demonstrations | None = None
    """Demonstrations whose loss is measured beside."""
    images: ImageReader | None = None
    """Images of a vision-language model."""
    whole: WholeModel | None = None
    """The multimodal model that a text model is published in, where its other parts stay frozen."""


def prepare(settings: LearnerSettings, demonstrations: Path | None) -> Initial:
    """Read the initial model, making the scratch model if need be, and the demonstrations. Raises
    `ConfigError` when model, tokenizer or demonstrations do not belong together."""
    torch.manual_seed(settings.seed)
    if settings.model.path is None and settings.model.from_run is None:
        with one_at_a_time(settings.model_directory):
            ensure_model_directory(settings.model_directory, settings.model.scratch, seed=settings.seed)
    hf_config, state = load_hf_directory(settings.model_directory)
    tokenizer = load_tokenizer(settings.model_directory)
    refuse_misfit(hf_config, tokenizer, settings.model_directory)
    if settings.warmup.makes_reward_model:
        hf_config, state = as_reward_model(hf_config, state, tokenizer, seed=settings.seed)
    else:
        refuse_reward_model(settings.model_directory, hf_config, settings.model_directory)
    images = ImageChat.of(settings.model_directory, tokenizer)
    if images is not None and (problem := settings.learner.unseeing_teachers):
        raise ConfigError(f"{settings.model_directory} is a vision-language model; {problem}")
    shown, heldout = None, None
    if settings.warmup.steps:
        if demonstrations is None:
            raise ConfigError("warmup.steps needs warmup.demonstrations, or data.task to generate some")
        paired = settings.warmup.loss.facts.of_pairs
        made = partial(
            Demonstrations, tokenizer=tokenizer, seed=settings.seed, images=images, paired=paired,
            context=hf_config.get_text_config().max_position_embeddings,
            vocabulary=hf_config.get_text_config().vocab_size,
        )  # fmt: skip
        load = load_pairs if paired else load_demonstrations
        shown = made(load(demonstrations))
        if settings.warmup.heldout is not None:
            heldout = made(load(settings.warmup.heldout))
    whole = None
    if settings.model.other_parts == "frozen":
        whole = _whole_model(settings, hf_config)
    return Initial(hf_config, state, shown, heldout, None if images is None else images.reader, whole)


def _whole_model(settings: LearnerSettings, text: PretrainedConfig) -> WholeModel:
    """Return the model that the text model lies in. Raises `ConfigError` where it lies in none, and for
    settings that publish something other than weights by the names of its files."""
    directory, where = settings.model_directory, "model.other_parts=frozen"
    if raw_config(directory).get("model_type") == text.model_type:
        raise ConfigError(
            f"{where}: {directory}, a {text.model_type}, has no part that is not trained: leave it out"
        )
    if settings.learner.lora.exists:
        raise ConfigError(f"{where} with learner.lora: adapters would name other layers; set left_out")
    if (codes := settings.learner.publication.quantisation) != "none":
        raise ConfigError(
            f"{where} with learner.publication.quantisation={codes}: the other parts would be quantised too; "
            "set left_out"
        )
    return WholeModel.of(directory)


def refuse_misfit(hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Raise `ConfigError` when the tokenizer is not this model's, or writes no prompt."""
    refuse_other_vocabulary(hf_config, tokenizer, directory)
    refuse_no_template(tokenizer, directory)
