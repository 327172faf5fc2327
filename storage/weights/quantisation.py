"""Quantised weights as inference engines load them: which weights, under which names, and the model's config.

A weight `x.weight` in fp8 has its codes under its own name and its scales beside it: `x.weight_scale_inv`
with blocks (DeepSeek-V3, arXiv:2412.19437, section 3.3), or `x.weight_scale` where the whole tensor has one,
or each row has (compressed-tensors' layout float-quantized). Both are factors of the codes, whatever their
name says. In int4 (compressed-tensors' layout pack-quantized) it has codes in `x.weight_packed`, a scale for
each group of columns of a row in `x.weight_scale`, and its shape in `x.weight_shape`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from bus.codec import Json
from bus.errors import ConfigError
from storage.weights.fp8 import Blocks
from storage.weights.int4 import GROUP, PACKED_COLUMNS

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]
BLOCK = 128
"""Rows and columns of a block."""
BLOCKS = Blocks(BLOCK, BLOCK)
CODES = "F8_E4M3"
"""Name of the codes' dtype in safetensors."""
BLOCK_SCALE, TENSOR_SCALE = "_scale_inv", "_scale"
"""What the names of scales have after that of their weight."""
PACKED, SHAPE = "_packed", "_shape"
"""The same of codes in int4, and of the shapes of their weights."""
METHOD, LAYOUT = "compressed-tensors", "pack-quantized"
"""Names of the layout of int4 in config.json."""
FLOAT_LAYOUT = "float-quantized"
"""Name of the layout of fp8 by the same method."""
_WEIGHT = ".weight"
_ENDS = (BLOCK_SCALE, TENSOR_SCALE, PACKED, SHAPE)
_LINEAR = re.compile(
    r"(^|\.)(\w+_proj|kv_a_proj_with_mqa|in_proj_qkvz?|in_proj_z|w[123]|wq_b|wk"
    r"|fc[12]|fc_(in|out)|c_fc|c_attn|dense|dense_(h_to_4h|4h_to_h)|query_key_value|Wqkv|linear_(x|y|out))\.weight$"
)
"""Linear layers of attention, of MLPs and of experts, by their names in the model families there are: all of
a family, since a model that is quantised in part is neither small nor as exact as the part that is not."""
_FUSED = re.compile(r"(^|\.)attn\.c_attn\.weight$")
"""Queries, keys and values of GPT-2 and of GPT-BigCode: with more columns than rows it is GPT-2's, whose
weights have rows and columns in one another's places."""
_KEPT = re.compile(r"(^|\.)(weights_proj|eh_proj)\.weight$|(^|\.)(visual|vision\w*|audio\w*)\.")
"""Small or sensitive layers among them, which published fp8 checkpoints have in bfloat16."""
Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtypes in safetensors and shapes of the tensors of a quantised weight, by what their names have after its
own."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """One way to have weights in fp8."""

    name: str
    """Name of the format in settings."""
    by_block: bool
    """Whether each block has a scale; else each tensor has one."""
    powers_of_two: bool = False
    """Whether scales are powers of two (ue8m0), stored as float32."""

    @property
    def suffix(self) -> str:
        """Return what the names of its scales have after that of their weight."""
        return BLOCK_SCALE if self.by_block else TENSOR_SCALE

    def blocks(self, shape: tuple[int, ...]) -> Blocks:
        """Return which elements of a weight share a scale."""
        return BLOCKS if self.by_block else Blocks(*shape)

    def stored(self, shape: tuple[int, ...], dtype: str) -> Stored:
        """Return what there is of a weight of this shape and of this dtype in safetensors."""
        scales = BLOCKS.counts(shape) if self.by_block else ()
        return {"": (CODES, shape), self.suffix: ("F32", scales)}


@dataclass(frozen=True, slots=True)
class Int4Format:
    """Weights in int4, symmetric, with scales in the dtype that the weights had."""

    name: str = "int4"

    def blocks(self, shape: tuple[int, ...]) -> Blocks:
        return Blocks(1, GROUP)

    def stored(self, shape: tuple[int, ...], dtype: str) -> Stored:
        rows, columns = shape
        return {
            PACKED: ("I32", (rows, columns // PACKED_COLUMNS)),
            TENSOR_SCALE: (dtype, (rows, columns // GROUP)),
            SHAPE: ("I64", (2,)),
        }


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """Weights in fp8 with a scale for each row, as compressed-tensors stores them."""

    name: str = "fp8_channel"

    def stored(self, shape: tuple[int, ...], dtype: str) -> Stored:
        return {"": (CODES, shape), TENSOR_SCALE: ("F32", (shape[0], 1))}


Format = Fp8Format | Int4Format
FileFormat = Format | ChannelFormat
FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        Fp8Format("fp8_block", by_block=True),
        Fp8Format("fp8_ue8m0", by_block=True, powers_of_two=True),
        Fp8Format("fp8_tensor", by_block=False),
        Int4Format(),
    )
}
INT4 = FORMATS["int4"]
CONVERTIBLE: Mapping[str, FileFormat] = {**FORMATS, "fp8_channel": ChannelFormat()}
"""Formats of model directories, by name; those of versions that are published are `FORMATS`."""


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a weight is one that is quantised, by its Hugging Face name and its shape. Embeddings, the
    output layer, norms, routers and biases are not."""
    return len(shape) == 2 and _LINEAR.search(name) is not None and _KEPT.search(name) is None


def scale_names(weight: str) -> tuple[str, str]:
    """Return the names that the scales of a weight may have."""
    return weight + BLOCK_SCALE, weight + TENSOR_SCALE


def weight_of(name: str) -> str | None:
    """Return the name of the weight whose scales, in fp8, have this name; None for a name of no scales."""
    for suffix in (BLOCK_SCALE, TENSOR_SCALE):
        if name.endswith(_WEIGHT + suffix):
            return name.removesuffix(suffix)
    return None


def int4_names(weight: str) -> tuple[str, str, str]:
    """Return the names of codes, scales and shape of a weight in int4."""
    return weight + PACKED, weight + TENSOR_SCALE, weight + SHAPE


def published_as(names: Iterable[str]) -> str:
    """Return what `learner.publication.quantisation` is where tensors of these names are published."""
    ends = {name.rpartition(_WEIGHT)[2] for name in names}
    if PACKED in ends:
        return INT4.name
    of_fp8 = (one for one in FORMATS.values() if isinstance(one, Fp8Format))
    return " or ".join(one.name for one in of_fp8 if one.suffix in ends) or "none"


def with_scales(some: Mapping[str, T], every: Mapping[str, T]) -> dict[str, T]:
    """Return `some` of the tensors, with the scales of each weight among them and the weight of each scale.
    Either means nothing without the other to those who undo the quantisation."""
    wanted = dict(some)
    for name in some:
        weight, end = _parted(name)
        partners = (weight + each for each in ("", *_ENDS)) if end is not None else ()
        wanted |= {partner: every[partner] for partner in partners if partner in every}
    return wanted


def _parted(name: str) -> tuple[str, str | None]:
    before, found, end = name.rpartition(_WEIGHT)
    return before + _WEIGHT, end if found and end in ("", *_ENDS) else None


def quantisation_config(found: FileFormat, shapes: Shapes) -> dict[str, Json]:
    """Return `quantization_config` of config.json, as transformers, SGLang and vLLM read it.

    Args:
        found: format of the weights that are quantised.
        shapes: shapes of all weights by their Hugging Face name, before any is quantised.
    Raises `ConfigError` for weights that cannot be quantised so."""
    refuse_unsuitable(found, shapes)
    if not any(is_quantised(name, shape) for name, shape in shapes.items()):
        raise ConfigError(
            f"{found.name} is for linear layers by the names of known families, as q_proj and up_proj, and "
            f"this model has none, but {next(iter(shapes), 'nothing')} and others: it cannot be quantised"
        )
    if not isinstance(found, Fp8Format):
        return _compressed_config(found, shapes)
    config: dict[str, Json] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if found.by_block:
        config["weight_block_size"] = [BLOCK, BLOCK]
    if found.powers_of_two:
        config["scale_fmt"] = "ue8m0"
    config["modules_to_not_convert"] = [*sorted(kept_modules(shapes))]
    return config


def kept_modules(shapes: Shapes) -> Iterable[str]:
    """Yield the layers that stay as they are, by their whole names: engines compare parts of them."""
    for name, shape in shapes.items():
        layer = len(shape) == 2 and name.endswith(_WEIGHT) and "embed" not in name
        if layer and not is_quantised(name, shape):
            yield name.removesuffix(_WEIGHT)
    if "lm_head.weight" not in shapes:  # tied to the embeddings, and a linear layer still
        yield "lm_head"


def _compressed_config(found: Int4Format | ChannelFormat, shapes: Shapes) -> dict[str, Json]:
    group: dict[str, Json] = {"targets": ["Linear"]}
    if isinstance(found, Int4Format):
        group["weights"] = {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
            "dynamic": False,
        }  # fmt: skip
    else:
        fp8: dict[str, Json] = {"num_bits": 8, "type": "float", "symmetric": True}
        group["weights"] = {**fp8, "strategy": "channel", "dynamic": False}
        group["input_activations"] = {**fp8, "strategy": "token", "dynamic": True}
    return {
        "quant_method": METHOD,
        "format": LAYOUT if isinstance(found, Int4Format) else FLOAT_LAYOUT,
        "quantization_status": "compressed",
        "ignore": [*sorted(kept_modules(shapes))],
        "config_groups": {"group_0": group},
    }


def refuse_unsuitable(found: FileFormat, shapes: Shapes) -> None:
    """Raise `ConfigError` for weights, by their Hugging Face names, that cannot be quantised so."""
    for name, shape in shapes.items():
        if _FUSED.search(name) and shape[0] < shape[-1]:
            raise ConfigError(
                f"{name} is GPT-2's, whose layers are transposed, so that blocks and rows of codes would be "
                "others for engines: this model cannot be quantised"
            )
        if len(shape) == 3 and "experts" in name:
            raise ConfigError(
                f"{name} holds {shape[0]} experts in one tensor, and {found.name} is for experts with a "
                "tensor each: this model cannot be quantised"
            )
        if isinstance(found, Int4Format) and is_quantised(name, shape) and shape[1] % GROUP:
            raise ConfigError(
                f"{name} has {shape[1]} columns, and int4 has a scale for each {GROUP} of them: this model "
                "cannot be quantised so; choose fp8_block"
            )
