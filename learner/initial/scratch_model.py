"""A model directory made here: a tiny random Qwen3 and a tokenizer of one token per character."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3VLConfig

from bus.errors import ConfigError
from learner.config.model import ScratchModel, ScratchVision
from learner.model_directories.model_directory import load_hf_config, save_hf_directory

if TYPE_CHECKING:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
MERGE = 2
"""Patches in a row, and in a column, that become one token."""
GRID = 16
"""Rows of learned positions, which are interpolated to those of an image."""


def vision_config(
    sizes: ScratchVision, text: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast
) -> Qwen3VLConfig:
    """Return the configuration of a Qwen3-VL whose language model has the hyperparameters `text`."""
    half = text["head_dim"] // 2
    side = 5 * half // 16  # as published models divide a head: 24, 20 and 20 of 64
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config={
            **text,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True,
                "mrope_section": [half - 2 * side, side, side],
            },
        },
        vision_config={
            "depth": sizes.layers,
            "hidden_size": sizes.hidden_size,
            "num_heads": sizes.heads,
            "intermediate_size": sizes.intermediate_size,
            "patch_size": sizes.patch_size,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": GRID**2,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=text["tie_word_embeddings"],
    )  # fmt: skip


def image_processor(sizes: ScratchVision) -> "Qwen2VLImageProcessorPil":
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    token = (MERGE * sizes.patch_size) ** 2
    return Qwen2VLImageProcessorPil(
        patch_size=sizes.patch_size,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": token, "longest_edge": max(token, sizes.largest_pixels)},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


PAD, END, USER, ASSISTANT, UNKNOWN = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>"
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=():,.?\n%<>|"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
              "intermediate_size", "max_position_embeddings")  # fmt: skip
VISION_SIZES = ("depth", "hidden_size", "num_heads", "intermediate_size", "patch_size")


def ensure_model_directory(directory: Path, sizes: ScratchModel, *, seed: int) -> None:
    """Make the directory if it is not there. Raises `ConfigError` when it holds a model of other sizes."""
    if not (directory / "config.json").exists():
        build_model_directory(directory, sizes, seed=seed)
        return
    wanted = scratch_config(sizes)
    if other := list(_other_sizes(load_hf_config(directory), wanted)):
        raise ConfigError(
            f"the run's scratch model in {directory} was made with other sizes ({', '.join(other)}): "
            "choose another --run, or the sizes it was made with"
        )


def _other_sizes(found: PretrainedConfig, wanted: PretrainedConfig) -> Iterator[str]:
    if found.model_type != wanted.model_type:
        yield f"it is a {found.model_type}, not a {wanted.model_type}"
        return
    pairs = [("", key, found.get_text_config(), wanted.get_text_config()) for key in TEXT_SIZES]
    if vision := getattr(wanted, "vision_config", None):
        pairs += [("vision.", key, found.vision_config, vision) for key in VISION_SIZES]
    for part, key, has, wants in pairs:
        if getattr(has, key) != getattr(wants, key):
            yield f"{part}{key} is {getattr(has, key)}, not {getattr(wants, key)}"


def build_model_directory(directory: Path, sizes: ScratchModel, *, seed: int) -> Path:
    """Write config, random weights (drawn from `seed`) and tokenizer into `directory`; returns it."""
    # The imports take a second, which a learner that goes on has no use for.
    from transformers import Qwen3ForCausalLM, Qwen3VLForConditionalGeneration

    sees = sizes.vision.layers > 0
    tokenizer = character_tokenizer(images=sees)
    config = _config(sizes, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config) if sees else Qwen3ForCausalLM(config)
    save_hf_directory(directory, config, dict(model.named_parameters()), None)
    tokenizer.save_pretrained(directory)
    if sees:
        image_processor(sizes.vision).save_pretrained(directory)
    return directory


def scratch_config(sizes: ScratchModel) -> PretrainedConfig:
    return _config(sizes, character_tokenizer(images=sizes.vision.layers > 0))


def character_tokenizer(*, images: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per character of a small alphabet, with a chat template; with `images`
    it has the tokens that stand for them."""
    vision = VISION_TOKENS if images else ()
    tokens = (PAD, END, USER, ASSISTANT, UNKNOWN, *ALPHABET, *vision)
    vocabulary = {token: n for n, token in enumerate(tokens)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, *vision],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _config(sizes: ScratchModel, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.hidden_size // sizes.heads,
        "max_position_embeddings": sizes.context,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if sizes.vision.layers:
        return vision_config(sizes.vision, text, tokenizer)
    # inference engines tell by the architecture what to serve
    return Qwen3Config(architectures=["Qwen3ForCausalLM"], **text)
