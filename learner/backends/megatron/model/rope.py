"""Angles of the rotary embedding (arXiv:2104.09864), scaled as the configuration says."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import JsonValue
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SCALED = ("linear", "llama3", "yarn")
"""Kinds of scaling whose angles are the same in every sequence."""


class Rope(NamedTuple):
    """A rotary embedding of whole heads of width d."""

    frequencies: Tensor
    """float32 [d / 2], radians per position."""
    factor: float = 1.0
    """Factor of the rotated queries and keys (arXiv:2309.00071, section 3.4)."""

    def rotation(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for `split_heads`, twice [T, 1, d], of tokens at these positions [T]."""
        angles = torch.outer(position_ids.float(), self.frequencies)[:, None]
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rope_of(hf_config: PretrainedConfig, head_dim: int, device: torch.device) -> Rope:
    """Make the rotary embedding of a configuration; transformers itself computes the scaled ones."""
    if (kind := rope_type(hf_config)) != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
        return Rope(frequencies.to(device), factor)
    rotated = int(head_dim * rope_parameters(hf_config).get("partial_rotary_factor", 1.0))
    exponent = torch.arange(0, rotated, 2, dtype=torch.int64, device=device).float() / rotated
    frequencies = 1.0 / _theta(hf_config) ** exponent
    return Rope(F.pad(frequencies, (0, (head_dim - rotated) // 2)))  # the rest of the head is turned by 0


def rope_type(hf_config: PretrainedConfig) -> str:
    """Return the kind of scaling; `default` is none."""
    return str(rope_parameters(hf_config).get("rope_type", "default"))


def rope_parameters(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return what the configuration says of its rotary embedding."""
    return getattr(hf_config, "rope_parameters", None) or {}


def rope_settings(hf_config: PretrainedConfig) -> dict[str, JsonValue]:
    """Return what decides the angles: the base of the frequencies, and how they are scaled."""
    settings: dict[str, JsonValue] = {"rope_theta": _theta(hf_config)}
    given = rope_parameters(hf_config)
    if (part := given.get("partial_rotary_factor", 1.0)) != 1.0:
        settings["partial_rotary_factor"] = part
    if rope_type(hf_config) != "default":
        settings["rope_scaling"] = {n: given[n] for n in sorted(given) if n not in ("rope_theta", "type")}
    return settings


def _theta(hf_config: PretrainedConfig) -> float:
    return float(rope_parameters(hf_config).get("rope_theta", 10000.0))
