"""Angles of the rotary embedding (arXiv:2104.09864), scaled as the configuration says."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import JsonValue
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from storage.exact_arithmetic.functions import cos_sin

SCALED = ("linear", "dynamic", "llama3", "yarn")
"""Kinds of scaling whose angles are the same in every sequence (learner/backends/shared/rope_scaling.py)."""


class Rope(NamedTuple):
    """A rotary embedding of whole heads of width d."""

    frequencies: Tensor
    """float32 [d / 2], radians per position."""
    factor: float = 1.0
    """Factor of the rotated queries and keys (arXiv:2309.00071, section 3.4)."""
    exact: bool = False
    """Whether cosine and sine are those of exact arithmetic."""

    def rotation(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for `split_heads`, twice [T, 1, d], of tokens at these positions [T]."""
        angles = torch.outer(position_ids.float(), self.frequencies)[:, None]
        cos, sin = cos_sin(angles) if self.exact else (angles.cos(), angles.sin())
        cos, sin = cos * self.factor, sin * self.factor
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def ropes_of(hf_config: PretrainedConfig, head_dim: int, device: torch.device) -> tuple[Rope, ...]:
    """Make the rotary embeddings that layers have, as `rope_numbers` counts them."""
    return tuple(_rope_of(hf_config, kind, head_dim, device) for kind in _by_kind(hf_config))


def rope_numbers(hf_config: PretrainedConfig) -> list[int]:
    """Return the number of the rotary embedding of each layer."""
    kinds = list(_by_kind(hf_config))
    if kinds == [None]:
        return [0] * hf_config.num_hidden_layers
    return [kinds.index(kind) for kind in hf_config.layer_types]


def _rope_of(hf_config: PretrainedConfig, kind: str | None, head_dim: int, device: torch.device) -> Rope:
    """Make the rotary embedding of a kind of layers; transformers itself computes the scaled ones."""
    given = _by_kind(hf_config)[kind]
    if (scaling := given.get("rope_type", "default")) != "default":
        of_kind = {} if kind is None else {"layer_type": kind}
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling](hf_config, torch.device("cpu"), **of_kind)
        return Rope(frequencies.to(device), factor)
    rotated = int(head_dim * given.get("partial_rotary_factor", 1.0))
    exponent = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    frequencies = 1.0 / _theta(given) ** exponent  # on the CPU, like transformers: a GPU's powers are others
    padded = F.pad(frequencies, (0, (head_dim - rotated) // 2))  # the rest of the head is turned by 0
    return Rope(padded.to(device))


def rotated_parts(hf_config: PretrainedConfig) -> list[float]:
    """Return the shares of a head that layers rotate."""
    of_all = getattr(hf_config, "partial_rotary_factor", None) or 1.0
    return sorted({given.get("partial_rotary_factor", of_all) for given in _by_kind(hf_config).values()})


def rope_settings(hf_config: PretrainedConfig) -> dict[str, JsonValue]:
    """Return what decides the angles: the base of the frequencies, and how they are scaled."""
    of_kinds = {kind: _settings(given) for kind, given in _by_kind(hf_config).items()}
    if None in of_kinds:
        return of_kinds[None]
    return {"ropes": {str(kind): settings for kind, settings in of_kinds.items()}}


def _settings(given: dict[str, Any]) -> dict[str, JsonValue]:
    settings: dict[str, JsonValue] = {"rope_theta": _theta(given)}
    if (part := given.get("partial_rotary_factor", 1.0)) != 1.0:
        settings["partial_rotary_factor"] = part
    if given.get("rope_type", "default") != "default":
        settings["rope_scaling"] = {n: given[n] for n in sorted(given) if n not in ("rope_theta", "type")}
    return settings


def _by_kind(hf_config: PretrainedConfig) -> dict[str | None, dict[str, Any]]:
    """Return what the configuration says of rotary embeddings by the kind of layers that have one, in the
    order of layers; by None where all layers have the same."""
    given = getattr(hf_config, "rope_parameters", None) or {}
    if not any(isinstance(of_kind, dict) for of_kind in given.values()):
        return {None: given}
    return {kind: given.get(kind) or {} for kind in hf_config.layer_types}


def _theta(given: dict[str, Any]) -> float:
    return float(given.get("rope_theta", 10000.0))
