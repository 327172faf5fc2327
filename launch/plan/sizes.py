"""Sizes of a model's layers by the names that configurations use, and what a pass keeps of each token."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from transformers import PretrainedConfig

Sharing = Literal["embedding", "output", "expert", "divided", "whole"]
"""How Megatron's ranks share a tensor: tensor ranks the rows of a vocabulary, expert ranks the experts,
tensor ranks heads and widths, or nobody anything."""
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ROUTER = re.compile(r"mlp\.(gate|router)\.|shared_expert_gate")
_WHOLE = re.compile(
    r"(norm|layernorm)\.(weight|bias)$|mlp\.(gate|router)\.|shared_expert_gate|q_a_proj|kv_a_proj"
    r"|(o_proj|down_proj)\.bias$|e_score_correction_bias$"
)
"""Norms, routers, the narrow projections of latent attention, and biases that are added once."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model, without its values."""

    name: str
    shape: tuple[int, ...]
    elements: int
    layer: int | None
    sharing: Sharing


def weights_of(hf_config: PretrainedConfig) -> list[Weight]:
    """Return the parameters of the model that transformers builds of a configuration, without their memory. A
    tied output layer is the embedding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from storage.model_files.families import family_named

    kind = (
        AutoModelForImageTextToText
        if family_named(hf_config.model_type).sees_images
        else AutoModelForCausalLM
    )
    with torch.device("meta"):
        model = kind.from_config(hf_config)
    model.tie_weights()
    return [
        Weight(name, tuple(each.shape), each.numel(), _layer(name), _sharing(name, each.ndim))
        for name, each in model.named_parameters()
    ]


def _layer(name: str) -> int | None:
    found = LAYER.search(name)
    return None if found is None else int(found[1])


def _sharing(name: str, dimensions: int) -> Sharing:
    if "embed_tokens" in name:
        return "embedding"
    if name.endswith("lm_head.weight"):
        return "output"
    if ".experts." in name:
        return "expert"
    if _WHOLE.search(name) or (dimensions == 1 and LAYER.search(name) is None):
        return "whole"
    return "divided"


def adapter_elements(weight: Weight, rank: int, targets: Iterable[str], *, experts: bool) -> int:
    """Return how many parameters the adapters of a weight have (arXiv:2106.09685): for each matrix of O rows
    and I columns `rank * (O + I)`. A tensor of several experts, or of two projections of one, has a pair for
    each."""
    name = weight.name.removesuffix(".weight")
    is_expert, is_router = weight.sharing == "expert", _ROUTER.search(weight.name) is not None
    if weight.layer is None or len(weight.shape) < 2 or is_router or is_expert > experts:
        return 0
    if targets and not any(name.endswith(target) for target in targets):
        return 0
    rows, columns = weight.shape[-2:]
    each = 2 * (rows // 2 + columns) if name.endswith("gate_up_proj") else rows + columns
    return rank * each * (weight.shape[0] if len(weight.shape) == 3 else 1)


def size(config: PretrainedConfig, *names: str) -> int:
    """Return the first size of these names that a configuration has, or 0."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value:
            return value
    return 0


@dataclass(frozen=True, slots=True)
class LayerElements:
    """Elements that one layer keeps of a token for its backward pass."""

    of_norms: int
    """Elements that tensor ranks have alike, unless they share the tokens between layers (`sequence`)."""
    divided: int
    """Elements that tensor ranks share."""


def layer_elements(hf_config: PretrainedConfig, layer: int) -> LayerElements:
    """Return what a layer keeps of a token (as in arXiv:2205.05198, section 4), with kernels that keep no
    intermediate of norms, rotary embeddings, attention and gates.

    Each of its two norms keeps its input and its output, which the linear layer behind it multiplies: 4 H.
    Attention keeps its projected queries, keys and values, the rotated queries and keys, and its result."""
    config = hf_config.get_text_config()
    hidden = size(config, "hidden_size")
    return LayerElements(4 * hidden, _mixing(config, layer) + _mlp(config, layer))


def _mixing(config: PretrainedConfig, layer: int) -> int:
    heads = size(config, "num_attention_heads")
    width = size(config, "head_dim") or size(config, "hidden_size") // heads
    if _is_delta(config, layer):
        keys = size(config, "linear_num_key_heads") * size(config, "linear_key_head_dim")
        values = size(config, "linear_num_value_heads") * size(config, "linear_value_head_dim")
        # projected, convolved and normed queries and keys; values, their gate, the result and its norm
        return 3 * 2 * keys + 5 * values
    if rank := size(config, "kv_lora_rank"):
        plain, rotated = size(config, "qk_nope_head_dim"), size(config, "qk_rope_head_dim")
        value = size(config, "v_head_dim")
        narrow = 2 * (size(config, "q_lora_rank") + rank) + rotated
        # queries and keys as projected and as rotated, values as projected and as attention takes them
        return narrow + heads * (4 * (plain + rotated) + 3 * value)
    queries, keys = heads * width, (size(config, "num_key_value_heads") or heads) * width
    return (queries + 2 * keys) + (queries + keys) + queries


def _is_delta(config: PretrainedConfig, layer: int) -> bool:
    kinds = getattr(config, "layer_types", None)
    return kinds is not None and kinds[layer] == "linear_attention"


def _mlp(config: PretrainedConfig, layer: int) -> int:
    """Return what an MLP keeps: its gate, its up projection and their product; each expert of a token also
    its copy of the input and its output."""
    hidden, dense = size(config, "hidden_size"), 3 * size(config, "intermediate_size")
    chosen = size(config, "num_experts_per_tok")
    if not is_mixture(config, layer):
        return dense
    width = size(config, "moe_intermediate_size", "intermediate_size")
    shared = size(config, "shared_expert_intermediate_size") or width * size(config, "n_shared_experts")
    experts = size(config, "num_experts", "n_routed_experts", "num_local_experts")
    scores = 4 * experts  # float32 logits and probabilities, in elements of 2 bytes
    return chosen * (2 * hidden + 3 * width) + 3 * shared + scores


def is_mixture(config: PretrainedConfig, layer: int) -> bool:
    if not size(config, "num_experts_per_tok"):
        return False
    if not size(config, "num_experts", "n_routed_experts", "num_local_experts"):
        return False
    if layer in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds:
        return bool(kinds[layer] == "sparse")
    if layer < size(config, "first_k_dense_replace"):
        return False
    return (layer + 1) % (size(config, "decoder_sparse_step") or 1) == 0


def kv_bytes(hf_config: PretrainedConfig) -> int:
    """Return the bytes of a token's 16-bit keys and values in all layers of an engine; latent attention keeps
    one narrow vector, delta nets keep nothing of a token."""
    config = hf_config.get_text_config()
    layers = [n for n in range(size(config, "num_hidden_layers")) if not _is_delta(config, n)]
    heads = size(config, "num_attention_heads")
    width = size(config, "head_dim") or size(config, "hidden_size") // heads
    each = 2 * (size(config, "num_key_value_heads") or heads) * width
    if rank := size(config, "kv_lora_rank"):
        each = rank + size(config, "qk_rope_head_dim")
    return len(layers) * each * 2
