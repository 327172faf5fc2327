"""Tiny random multimodal models whose text models are trained alone."""

from functools import lru_cache
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from learner.model_directories.model_directory import save_weights
from tests.learner.tiny import hf_state, tiny_config

_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
}
_KIMI_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
WRAPPERS = {
    "gemma3": ("Gemma3Config", "gemma3_text", {"vision_config": _VISION, "mm_tokens_per_image": 4}),
    "kimi_k25": ("Kimi_K25Config", "deepseek_v3", {"vision_config": _KIMI_VISION}),
    "mistral3": (
        "Mistral3Config", "mistral", {"vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16}}
    ),
    "qwen3_5": ("Qwen3_5Config", "qwen3_5_text", {"vision_config": _QWEN_VISION}),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "qwen3_5_moe_text", {"vision_config": _QWEN_VISION}),
}  # fmt: skip


@lru_cache
def wrapper(kind: str, *, tied: bool = False) -> PreTrainedModel:
    """A multimodal model of this type, which nobody changes."""
    name, text, parts = WRAPPERS[kind]
    torch.default_generator.manual_seed(0)
    config = getattr(transformers, name)(
        text_config=tiny_config(text, tied=tied).to_dict(), tie_word_embeddings=tied, **parts
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def save_wrapper(kind: str, directory: Path, *, stacked: bool = False, **settings: bool) -> PreTrainedModel:
    """Write its directory; return the model. With `stacked` experts are one tensor of files."""
    model = wrapper(kind, **settings)
    # Of Kimi, transformers writes names that the published files do not have.
    state = _kimi_state(model) if kind == "kimi_k25" else hf_state(model)
    if stacked:
        state = {name: tensor for name, tensor in state.items() if ".experts." not in name}
        state |= {n: t for n, t in model.state_dict().items() if ".experts." in n}
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    save_weights(directory, {name: tensor for name, tensor in state.items() if _is_in_files(name, model)})
    return model


def _is_in_files(name: str, model: PreTrainedModel) -> bool:
    return not (model.config.tie_word_embeddings and name.endswith("lm_head.weight"))


def _kimi_state(model: PreTrainedModel) -> dict[str, Tensor]:
    text = AutoModelForCausalLM.from_config(model.config.get_text_config())
    own = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(("lm_head", "model.language_model."))
    }
    inner = {f"language_model.{name}": tensor for name, tensor in revert_weight_conversion(text, own).items()}
    return inner | {n: t for n, t in hf_state(model).items() if not n.startswith("language_model")}
