"""Weights in fp8 as inference engines load them: which weights, under which names, and the model's config.

A weight `x.weight` that is quantised has its codes under its own name and its scales beside it:
`x.weight_scale_inv` with blocks (DeepSeek-V3, arXiv:2412.19437, section 3.3), or `x.weight_scale` where the
whole tensor has one. Both are factors of the codes, whatever their name says."""

import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np

from bus.codec import Json
from bus.errors import ConfigError, StorageError
from storage.weights.fp8 import Blocks, Codes, Floats, encoded, largest_magnitudes, scales_of
from storage.weights.tensors import HostTensor, in_order

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]
BLOCK = 128
"""Rows and columns of a block."""
BLOCKS = Blocks(BLOCK, BLOCK)
TASK_ELEMENTS = 1 << 23
"""Elements that a thread takes at a time: large models have millions of blocks, and tasks cost the main
thread."""
CODES = "F8_E4M3"
"""Name of the codes' dtype in safetensors."""
BLOCK_SCALE, TENSOR_SCALE = "_scale_inv", "_scale"
"""What the names of scales have after that of their weight."""
_WEIGHT = ".weight"
_LINEAR = re.compile(r"(^|\.)(\w+_proj|kv_a_proj_with_mqa|in_proj_qkvz?|in_proj_z|w[123]|wq_b|wk)\.weight$")
"""Linear layers of attention, of MLPs and of experts, by their names in the model families there are."""
_KEPT = re.compile(r"(^|\.)(weights_proj|eh_proj)\.weight$|(^|\.)(visual|vision\w*|audio\w*)\.")
"""Small or sensitive layers among them, which published fp8 checkpoints have in bfloat16."""


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

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight."""
        return BLOCKS.counts(shape) if self.by_block else ()

    def blocks(self, shape: tuple[int, ...]) -> Blocks:
        """Return which elements of a weight share a scale."""
        return BLOCKS if self.by_block else Blocks(*shape)


FORMATS: Mapping[str, Fp8Format] = {
    one.name: one
    for one in (
        Fp8Format("fp8_block", by_block=True),
        Fp8Format("fp8_ue8m0", by_block=True, powers_of_two=True),
        Fp8Format("fp8_tensor", by_block=False),
    )
}


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a weight is one that is quantised, by its Hugging Face name and its shape.

    Embeddings, the output layer, norms, routers and biases are not."""
    return len(shape) == 2 and _LINEAR.search(name) is not None and _KEPT.search(name) is None


def scale_names(weight: str) -> tuple[str, str]:
    """Return the names that the scales of a weight may have."""
    return weight + BLOCK_SCALE, weight + TENSOR_SCALE


def weight_of(name: str) -> str | None:
    """Return the name of the weight whose scales have this name; None for a name of no scales."""
    for suffix in (BLOCK_SCALE, TENSOR_SCALE):
        if name.endswith(_WEIGHT + suffix):
            return name.removesuffix(suffix)
    return None


def published_as(names: Iterable[str]) -> str:
    """Return what `learner.publication.quantisation` is where tensors of these names are published."""
    ends = {name.rpartition(_WEIGHT)[2] for name in names}
    return " or ".join(one.name for one in FORMATS.values() if one.suffix in ends) or "none"


def with_scales(some: Mapping[str, T], every: Mapping[str, T]) -> dict[str, T]:
    """Return `some` of the tensors, with the scales of each weight among them and the weight of each scale.

    Either means nothing without the other to those who undo the quantisation."""
    wanted = dict(some)
    for name in some:
        weight = weight_of(name) or name
        partners = (weight, *scale_names(weight)) if weight.endswith(_WEIGHT) else ()
        wanted |= {partner: every[partner] for partner in partners if partner in every}
    return wanted


def quantisation_config(found: Fp8Format, shapes: Shapes) -> dict[str, Json]:
    """Return `quantization_config` of config.json, as transformers, SGLang and vLLM read it.

    Args:
        found: format of the weights that are quantised.
        shapes: shapes of all weights by their Hugging Face name, before any is quantised."""
    refuse_fused_experts(shapes)
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


def refuse_fused_experts(shapes: Shapes) -> None:
    """Raise `ConfigError` for experts that lie in one tensor: engines that quantise want each by itself."""
    for name, shape in shapes.items():
        if len(shape) == 3 and "experts" in name:
            raise ConfigError(
                f"{name} holds {shape[0]} experts in one tensor, and fp8 is for experts with a tensor each: "
                "this model cannot be quantised"
            )


class _Job:
    """A weight that is being quantised."""

    def __init__(self, name: str, tensor: HostTensor, found: Fp8Format) -> None:
        self.name, self.tensor, self.format = name, tensor, found
        rows, self.width = tensor.shape
        self.codes: Codes = np.empty((rows, self.width), np.uint8)
        self.bands = range(0, rows, BLOCK)
        self.scales: Floats = np.empty(0, np.float32)
        """[rows of blocks, columns of blocks], the same in all of them where the tensor has one."""

    def values(self, start: int) -> Floats:
        """Return the values of one row of blocks."""
        rows = self.tensor.words.reshape(self.tensor.shape)[start : start + BLOCK]
        return widened(rows, self.tensor.dtype)

    def largest(self, start: int) -> Floats:
        """Return the largest magnitudes of the blocks in one row of them."""
        return largest_magnitudes(self.values(start), BLOCK)

    def set_scales(self, largest: list[Floats]) -> None:
        """Make the scales of the largest magnitudes. Raises `StorageError` for what is not finite."""
        magnitudes = np.stack(largest)
        if not np.isfinite(magnitudes).all():
            row, column = np.argwhere(~np.isfinite(magnitudes))[0] * BLOCK
            raise StorageError(
                f"{self.name} has values that are not finite, in the block that begins at row {row}, column "
                f"{column}: fp8 has no infinity, and the model cannot be used with them in any format"
            )
        if not self.format.by_block:
            magnitudes = np.full_like(magnitudes, magnitudes.max())
        self.scales = scales_of(magnitudes, powers_of_two=self.format.powers_of_two)

    def encode(self, start: int) -> None:
        """Write the codes of one row of blocks."""
        scales = self.scales[start // BLOCK]
        self.codes[start : start + BLOCK] = encoded(self.values(start), scales, BLOCK)

    def result(self) -> dict[str, HostTensor]:
        """Return codes and scales by their names."""
        shape = self.format.scales_shape(self.tensor.shape)
        scales = self.scales if self.format.by_block else self.scales[:1, :1]
        words = np.ascontiguousarray(scales).reshape(-1).view(np.uint32)
        return {
            self.name: HostTensor(CODES, self.tensor.shape, self.codes.reshape(-1)),
            self.name + self.format.suffix: HostTensor("F32", shape, words),
        }


def _tasks(jobs: Iterable[_Job]) -> Iterator[list[tuple[_Job, int]]]:
    """Yield rows of blocks, as jobs and where they start, in order: as many as a thread takes at a time."""
    task: list[tuple[_Job, int]] = []
    elements = 0
    for job in jobs:
        for start in job.bands:
            task.append((job, start))
            elements += BLOCK * job.width
            if elements >= TASK_ELEMENTS:
                yield task
                task, elements = [], 0
    if task:
        yield task


def _encode(task: Iterable[tuple[_Job, int]]) -> None:
    """Write the codes of a task."""
    for job, start in task:
        job.encode(start)


def quantised(
    tensors: Mapping[str, HostTensor], found: Fp8Format, threads: Executor | None = None
) -> dict[str, HostTensor]:
    """Return the tensors with codes and scales in the place of each weight that is quantised.

    The others are shared. Raises `StorageError` for a weight that is not finite."""
    jobs = {
        name: _Job(name, tensor, found)
        for name, tensor in tensors.items()
        if is_quantised(name, tensor.shape) and len(tensor.words)
    }
    tasks = list(_tasks(jobs.values()))
    found_largest = in_order(threads, lambda task: [job.largest(start) for job, start in task], tasks)
    largest = chain.from_iterable(found_largest)
    for job in jobs.values():
        job.set_scales([next(largest) for _ in job.bands])
    for _ in in_order(threads, _encode, tasks):
        pass
    result: dict[str, HostTensor] = {}
    for name, tensor in tensors.items():
        result |= jobs[name].result() if name in jobs else {name: tensor}
    return result


def widened(words: np.ndarray, dtype: str) -> Floats:
    """Return the values of words of a dtype in safetensors as float32. Raises `StorageError` for others."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F32":
        return words.view(np.float32)
    if dtype == "F16":
        return words.view(np.float16).astype(np.float32)
    raise StorageError(f"weights of {dtype} cannot be quantised: BF16, F16 and F32 can")
