"""Builds models of transformers, and lists for people what of them this backend would compute wrongly."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from bus.errors import ConfigError, in_short
from learner.backends.fsdp.attention import PACKED, PackedSequences
from learner.backends.shared.packed_attention import PACK_DEPENDENT_ROPES, within_sequences
from learner.backends.shared.rope_scaling import rope_types
from learner.backends.shared.score_head import is_reward_model
from storage.model_files.families import families_with, family_named


def begin_anew(model: PreTrainedModel) -> None:
    """Have the recurrent layers of a model begin anew at each sequence of a pack.

    A gated delta net (linear attention) has a recurrent state, and before it a causal convolution that looks
    at the tokens before; some models have such a convolution alone. Both would go on from one sequence of a
    pack to the next. So these layers are given the sequences apart, those of similar length together. The
    shorter ones are padded on the right, where a causal layer cannot look, so that no output and no gradient
    changes. Transformers takes kernels of the packages `fla` and `causal_conv1d` where they are installed."""
    layers = family_named(model.config.model_type).recurrent
    for module in model.modules():
        if layers is not None and type(module).__name__ == layers.module:
            module.forward = partial(_mixed, module.forward)


def _mixed(
    mix: Callable[..., Tensor], hidden_states: Tensor, *, packed: PackedSequences | None = None, **others: Any
) -> Tensor:
    if packed is None:
        return mix(hidden_states, **others)
    mixing = partial(mix, **others)
    return within_sequences(mixing, [hidden_states[0]], packed.buckets, packed.slots)[None]


UNBUILDABLE = (
    ValueError, KeyError, ImportError, TypeError, AttributeError, RuntimeError, IndexError, AssertionError,
    StrictDataclassError,
)  # fmt: skip
"""What code of transformers raises for types, and for sizes, that it was not written for."""
LAYER_KINDS = {"full_attention", "sliding_attention"}


def empty_model(hf_config: PretrainedConfig, device: torch.device) -> PreTrainedModel:
    """Return a float32 model whose weights mean nothing yet, without dropout, with our attention.

    Memory that nobody writes is not taken from the system. Raises `ConfigError` for what cannot be trained.
    """
    if problems := list(_unsupported(hf_config)):
        raise ConfigError(refusal(problems))
    config = copy.deepcopy(hf_config)
    try:
        with no_init_weights(), device:
            model = (
                _kind(config)
                .from_config(config, dtype=torch.float32, attn_implementation=attention_of(config))
                .eval()
            )
    except UNBUILDABLE as error:
        why = f"transformers does not build it: {in_short(repr(error))}"
        if error.args == (PACKED,):
            why = (
                f"model_type={config.model_type!r}: it takes no attention but its own, which would mix packs"
            )
        raise ConfigError(refusal([why])) from error
    model.tie_weights()  # skipped along with the initialisation
    if problems := list(_unsupported_model(model)):
        raise ConfigError(refusal(problems))
    begin_anew(model)
    # Sampled tokens may be those that pad elsewhere: they are trained like the others.
    model.get_input_embeddings().padding_idx = None
    return model


def _kind(hf_config: PretrainedConfig) -> Any:
    if is_reward_model(hf_config):
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if is_vision_model(hf_config) else AutoModelForCausalLM


def is_vision_model(hf_config: PretrainedConfig) -> bool:
    """Tell whether the model is of a vision-language family that can be trained."""
    return family_named(hf_config.model_type).sees_images


def attention_of(hf_config: PretrainedConfig) -> str | dict[str, str]:
    """Return the attention that the parts of a model compute: ours in what reads packs of tokens. A vision
    tower divides its patches by image itself, and calls torch's attention for each."""
    return {"text_config": PACKED, "vision_config": "sdpa"} if is_vision_model(hf_config) else PACKED


class LogitChange(NamedTuple):
    """What a model does to its logits; the check at the start compares it with transformers."""

    factor: float
    """Multiplies them (Cohere, Granite)."""
    cap: float | None
    """Bound on the magnitude of logits (Gemma)."""

    @classmethod
    def of(cls, hf_config: PretrainedConfig) -> "LogitChange":
        """Read the change from a configuration."""
        text = hf_config.get_text_config()
        factor = (getattr(text, "logit_scale", None) or 1.0) / (getattr(text, "logits_scaling", None) or 1.0)
        return cls(factor, getattr(text, "final_logit_softcapping", None))

    @property
    def changes(self) -> bool:
        """Tell whether logits are changed at all."""
        return self != (1.0, None)


def refusal(problems: list[str]) -> str:
    """Return the message of an error that lists problems of a model."""
    listed = "\n".join(f"- {problem}" for problem in problems)
    return f"learner.backend=fsdp cannot train this model:\n{listed}"


def _unsupported(hf_config: PretrainedConfig) -> Iterator[str]:
    text = hf_config.get_text_config()
    if text is not hf_config and not is_vision_model(hf_config):
        yield (
            f"model_type={hf_config.model_type!r}: it has more than a text model, and transformers has no "
            f"model of its text, a {text.model_type}, alone; give a text model, or one that is trained as a "
            f"whole: {', '.join(families_with(lambda family: family.sees_images))}"
        )
    if hf_config.is_encoder_decoder:
        yield "is_encoder_decoder=True: only decoders are supported"
    if getattr(hf_config, "quantization_config", None) is not None:
        remedy = "`launch convert dequantise` makes one of fp8 or int4"
        yield f"quantization_config: load the unquantized model; {remedy}"
    if getattr(text, "output_router_logits", False):
        yield "output_router_logits=True adds a load-balancing loss, which is not trained on: set it to false"
    recurrent = family_named(hf_config.model_type).recurrent
    known = LAYER_KINDS | ({recurrent.kind} if recurrent else set())
    if kinds := sorted(set(getattr(text, "layer_types", None) or ()) - known):
        yield f"layer_types: {', '.join(kinds)} would mix the sequences of a pack"
    if ropes := sorted(rope_types(text) & PACK_DEPENDENT_ROPES):
        yield f"rope_type={ropes[0]!r}: its angles would depend on the other sequences of a pack"


def _unsupported_model(model: PreTrainedModel) -> Iterator[str]:
    name = type(model).__name__
    # Models with linear attention take other attention as all do, but do not say so.
    if not model._supports_attention_backend and family_named(model.config.model_type).recurrent is None:
        yield f"{name} computes attention in a way of its own, in which the sequences of a pack would mix"
    if is_reward_model(model.config):
        return
    output = model.get_output_embeddings()
    if output is None or getattr(output, "bias", None) is not None:
        yield f"{name}: the fused output layer is a matrix without a bias"
