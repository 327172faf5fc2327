"""What is known of the families of models, in one table, so that nobody asks which family a model is of.

Loads without torch: code is named as `module:name`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bus.errors import ConfigError

BY_SOFTMAX = "learner.backends.fsdp.router_replay:by_softmax"
BY_SIGMOIDS = "learner.backends.fsdp.router_replay:by_sigmoids"
CONVERSION = "learner.backends.megatron.conversion"


class Router(NamedTuple):
    """The routers of a family with experts, in transformers."""

    module: str
    """Class of the routers."""
    weigh: str
    """What returns the weights of given experts (`learner.backends.fsdp.router_replay.Weigh`)."""


class Recurrent(NamedTuple):
    """The layers of a family that take a state from token to token."""

    kind: str
    """What the layers are called in `layer_types` of the configuration."""
    module: str
    """Class, in transformers, of the part that mixes tokens, which is causal and whose first argument is all
    it mixes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """What others go by about models of one `model_type`. The defaults hold for a family that only
    transformers knows."""

    megatron: str = ""
    """Tables of names and layers on Megatron, or what returns these for a configuration; empty where
    Megatron does not train it."""
    router: Router | None = None
    """The family's routers, if experts can be given to them."""
    recurrent: Recurrent | None = None
    """The layers with a state, if there are some."""
    heads_counted_in: str = ""
    """Field of the configuration that counts its heads for further tokens; empty where it has none."""
    one_head_by_default: bool = False
    """Transformers assumes one head where that field is left out, whose weights are those of a layer behind
    the last. Of other families the names of weights tell, which begin with `mtp`."""
    published_as: str = ""
    """The family whose model it is, where transformers does not know the `model_type`."""
    sees_images: bool = False
    """The family is a vision-language one that can be trained."""
    takes_adapters: bool = True
    """The files know layers that could have an adapter by transformers' names."""
    stacks_experts: bool = False
    """Published files have one tensor a layer of its experts, of which transformers writes one each."""
    sglang_sees: bool = False
    """SGLang gives it the tokens and pixels that the learner reads."""
    sglang_copies: Literal["no", "in_sessions", "always"] = "no"
    """Whether SGLang copies what it loads (`test_changes_of_families.py`): of other families it might compute
    something. Where it says `in_sessions`, changes go to versions alone that begin and end an update."""
    sglang_loads_output: bool = True
    """SGLang loads an output layer; else it computes with the embedding, or with what memory held."""
    sglang_kept_routers: bool = False
    """Some versions of SGLang choose its experts by the weights of their first pass for ever."""
    sglang_numerics: bool = False
    """SGLang has the arithmetic of `model.numerics=sglang` for it."""
    transformers_from: tuple[int, int] = (0, 0)
    """First version of transformers by which it is computed right; earlier ones miss fields of its
    configuration, or have other layers (`tests/versions`)."""


FIELDS_FROM = 5, 19
"""Transformers 5.12 lacks fields of these configurations or has other layers; 5.19 passes all tests."""
FAMILIES = {
    **dict.fromkeys(
        ("cohere", "cohere2", "cohere2_moe", "gemma", "gemma2", "gemma3", "gpt_bigcode", "persimmon"),
        ModelFamily(sglang_loads_output=False),
    ),
    "deepseek_v3": ModelFamily(
        megatron=f"{CONVERSION}.deepseek_v3:deepseek_v3",
        sglang_copies="in_sessions",
        router=Router("DeepseekV3TopkRouter", BY_SIGMOIDS),
        heads_counted_in="num_nextn_predict_layers",
        one_head_by_default=True,
        transformers_from=FIELDS_FROM,
    ),
    "gemma3_text": ModelFamily(
        megatron=f"{CONVERSION}.gemma3:gemma3", sglang_copies="in_sessions", sglang_loads_output=False
    ),
    "glm4": ModelFamily(megatron=f"{CONVERSION}.glm4_moe:glm4", sglang_copies="in_sessions"),
    "glm4_moe": ModelFamily(
        megatron=f"{CONVERSION}.glm4_moe:glm4_moe",
        sglang_copies="in_sessions",
        router=Router("Glm4MoeTopkRouter", BY_SIGMOIDS),
        heads_counted_in="num_nextn_predict_layers",
        one_head_by_default=True,
        sglang_kept_routers=True,
        transformers_from=FIELDS_FROM,
    ),
    "glm4_moe_lite": ModelFamily(
        megatron=f"{CONVERSION}.deepseek_v3:deepseek_v3", sglang_copies="in_sessions"
    ),
    "gpt_oss": ModelFamily(
        megatron=f"{CONVERSION}.mixtral:gpt_oss",
        sglang_copies="in_sessions",
        router=Router("GptOssTopKRouter", "learner.backends.fsdp.router_replay:by_softmax_of_chosen"),
        transformers_from=FIELDS_FROM,
    ),
    "kimi_k2": ModelFamily(published_as="deepseek_v3"),
    "lfm2": ModelFamily(recurrent=Recurrent("conv", "Lfm2ShortConv")),
    "lfm2_moe": ModelFamily(
        router=Router("Lfm2MoeTopKRouter", "learner.backends.fsdp.router_replay:by_sigmoids_of_lfm2"),
        recurrent=Recurrent("conv", "Lfm2MoeShortConv"),
    ),
    "llama": ModelFamily(megatron=f"{CONVERSION}.families:LLAMA", sglang_copies="always"),
    "minimax_m2": ModelFamily(megatron=f"{CONVERSION}.mixtral:minimax_m2", sglang_copies="in_sessions"),
    "mistral": ModelFamily(megatron=f"{CONVERSION}.families:MISTRAL", sglang_copies="in_sessions"),
    "mixtral": ModelFamily(
        megatron=f"{CONVERSION}.mixtral:MIXTRAL",
        router=Router("MixtralTopKRouter", BY_SOFTMAX),
        sglang_copies="in_sessions",
    ),
    "olmo_hybrid": ModelFamily(recurrent=Recurrent("linear_attention", "OlmoHybridGatedDeltaNet")),
    "qwen2": ModelFamily(megatron=f"{CONVERSION}.families:QWEN2", sglang_copies="always"),
    "qwen2_5_vl": ModelFamily(sees_images=True, takes_adapters=False),
    "qwen2_moe": ModelFamily(
        megatron=f"{CONVERSION}.qwen2_moe:QWEN2_MOE",
        router=Router("Qwen2MoeTopKRouter", BY_SOFTMAX),
        sglang_copies="in_sessions",
    ),
    "qwen3": ModelFamily(
        megatron=f"{CONVERSION}.families:QWEN3", sglang_copies="always", sglang_numerics=True
    ),
    "qwen3_5_moe_text": ModelFamily(
        megatron=f"{CONVERSION}.qwen3_next:qwen3_5_moe",
        sglang_copies="in_sessions",
        router=Router("Qwen3_5MoeTopKRouter", BY_SOFTMAX),
        recurrent=Recurrent("linear_attention", "Qwen3_5MoeGatedDeltaNet"),
        heads_counted_in="mtp_num_hidden_layers",
        stacks_experts=True,
        transformers_from=FIELDS_FROM,
    ),
    "qwen3_5_text": ModelFamily(
        megatron=f"{CONVERSION}.qwen3_next:qwen3_5",
        sglang_copies="in_sessions",
        recurrent=Recurrent("linear_attention", "Qwen3_5GatedDeltaNet"),
        heads_counted_in="mtp_num_hidden_layers",
        transformers_from=FIELDS_FROM,
    ),
    "qwen3_moe": ModelFamily(
        megatron=f"{CONVERSION}.qwen2_moe:QWEN3_MOE",
        router=Router("Qwen3MoeTopKRouter", BY_SOFTMAX),
        sglang_copies="in_sessions",
    ),
    "qwen3_next": ModelFamily(
        megatron=f"{CONVERSION}.qwen3_next:qwen3_next",
        sglang_copies="in_sessions",
        router=Router("Qwen3NextTopKRouter", BY_SOFTMAX),
        recurrent=Recurrent("linear_attention", "Qwen3NextGatedDeltaNet"),
        heads_counted_in="num_nextn_predict_layers",
        transformers_from=FIELDS_FROM,
    ),
    "qwen3_vl": ModelFamily(
        sees_images=True, sglang_sees=True, sglang_copies="always", transformers_from=FIELDS_FROM
    ),
}
"""Families by `model_type` of the transformers configuration."""
_OTHER = ModelFamily()


def family_named(model_type: object) -> ModelFamily:
    """Return what is known of a `model_type`, which may be whatever a file says; the defaults for another."""
    return FAMILIES.get(str(model_type), _OTHER)


def refuse_older_transformers(model_type: object, installed: str) -> None:
    """Raise `ConfigError` for a model that the installed version of transformers gets wrong."""
    first = family_named(model_type).transformers_from
    if tuple(int(part) for part in installed.split(".")[:2]) < first:
        raise ConfigError(
            f"a {model_type} needs transformers {first[0]}.{first[1]} or later, and {installed} is installed "
            "here: install a newer one. Where SGLang pins this one, give SGLang an environment of its own "
            "(actors.engine.python)"
        )


def families_with(has: Callable[[ModelFamily], object]) -> list[str]:
    """Return the names of the families of which `has` is true, for a message."""
    return [name for name, family in FAMILIES.items() if has(family)]
