"""The weights of a model by its configuration alone: how many there are, and how ranks share each of them."""

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
