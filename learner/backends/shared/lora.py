"""Low-rank adapters (arXiv:2106.09685), whatever backend trains them: which layers have one, the values that
it begins with, and the weights that it makes."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from pydantic import JsonValue
from torch import Tensor
from xxhash import xxh3_64_intdigest, xxh3_128

from bus.errors import ConfigError
from learner.config.lora import NO_LORA, LoraConfig, saved_settings
from learner.model_directories.lazy_weights import LazyWeights, Spec, State, part_of, spec_of, tensor_bytes
from storage.model_files.adapter_names import PREFIX, WEIGHT, adapter_names, magnitude_name

CHANGE = "lora_magnitude_change"
"""Ends the name of the parameter by which the lengths of a weight's rows change."""
SMALLEST_NORM = 1e-30
"""Rows of zeros stay zeros."""
LEAST_ROWS = 16
"""Libraries add up the products of fewer rows in another order, which rounds differently."""
SEEDS = (1 << 63) - 1
"""Bits that the seed of a generator may have."""


def targeted(config: LoraConfig, modules: Sequence[str], experts: Sequence[str] = ()) -> list[str]:
    """Return which of the linear layers `modules`, and of routed `experts` where they are to have adapters,
    that have one.

    Raises `ConfigError` for a target that is the end of no name, and for experts where there are none, or
    where no target names one."""
    if config.experts and not experts:
        raise ConfigError(
            "learner.lora.experts=true: the model has no routed experts whose projections each have a tensor "
            "of their own in its files: leave it out"
        )
    found = [*modules, *experts] if config.experts else list(modules)
    if not config.targets:
        return found
    for target in config.targets:
        if not any(_ends_with(module, target) for module in found):
            ends = sorted({module.rsplit(".", 1)[-1] for module in found})
            of_experts = any(_ends_with(module, target) for module in experts)
            hint = (
                "; routed experts have one, and adapters with learner.lora.experts=true" if of_experts else ""
            )
            raise ConfigError(
                f"learner.lora.targets: no linear layer of the transformer blocks is named {target!r}; there "
                f"are {', '.join(ends)}{hint}"
            )
    chosen = [module for module in found if any(_ends_with(module, target) for target in config.targets)]
    if config.experts and set(experts).isdisjoint(chosen):
        ends = sorted({module.rsplit(".", 1)[-1] for module in experts})
        raise ConfigError(
            f"learner.lora.experts=true has no effect with learner.lora.targets={list(config.targets)}, "
            f"which name no layer of routed experts: add {', '.join(ends)} or some of them, or leave experts "
            "out"
        )
    return chosen


def _ends_with(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def first_a(module: str, rank: int, inputs: int) -> Tensor:
    """Return the A that a layer begins with, float32 [rank, inputs], uniform up to 1 / sqrt(inputs).

    It depends on the run's seed and the layer's name alone, so that all backends and layouts of ranks begin
    alike."""
    generator = torch.Generator()
    generator.manual_seed((torch.initial_seed() ^ xxh3_64_intdigest(module.encode())) & SEEDS)
    bound = inputs**-0.5
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """Return W + scale * B A, computed in float32, as the dtype of W; with `magnitude` its rows have that
    length (arXiv:2402.09353, eq. 5).

    Actors compute the same (actors/weights/received.py)."""
    whole = weight.float() + scale * (b.float() @ a.float())
    if magnitude is not None:
        whole = _with_lengths(whole, magnitude, row_norms(whole))
    return whole.to(weight.dtype)


def _with_lengths(rows: Tensor, lengths: Tensor, norms: Tensor) -> Tensor:
    return rows * (lengths / norms.clamp(min=SMALLEST_NORM))[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartOfPair:
    """What one rank has of a weight's adapter, which is enough for the part of the weight that it has."""

    a: Tensor
    """[rank, columns of the weight on this rank]."""
    b: Tensor
    """[rows, rank]: rows from `first` on, of so many `outputs`."""
    first: int
    outputs: int
    inputs: int
    """Columns of the whole weight."""
    lengths: Tensor | None = None
    """Lengths of the same rows, float32; None where they are not trained."""
    norms: Tensor | None = None
    """Lengths that the same rows of W + scale * B A have, float32, where ranks share their columns."""

    @torch.no_grad()
    def merged(self, weight: Tensor, starts: Tensor, scale: float) -> Tensor:
        """Return what `merged` makes of rows of the weight, which begin there in it: to the bit, too.

        Args:
            weight: [n, columns], of any rows on this rank.
            starts: int64 [n].
            scale: factor of B A."""
        rows = (starts // self.inputs - self.first).to(weight.device)
        b = self.b[rows].float()
        lacking = min(LEAST_ROWS, self.outputs) - len(b)
        product = (F.pad(b, (0, 0, 0, max(0, lacking))) @ self.a.float())[: len(b)]
        whole = weight.float() + scale * product
        if self.lengths is not None:
            norms = row_norms(whole) if self.norms is None else self.norms[rows]
            whole = _with_lengths(whole, self.lengths[rows], norms)
        return whole.to(weight.dtype)


def merged_stream(
    weights: Iterable[tuple[str, Tensor]], adapters: Iterable[tuple[str, Tensor]], targets: Container[str],
    scale: float,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yield what weights and their adapters make together, by the weights' names in files.

    Adapters wait on the host meanwhile: those of all experts may be larger than what a device has left.

    Args:
        weights: of the whole model; the adapters are taken before the first of them.
        adapters: A, B and lengths of rows by peft's names, each good until the next.
        targets: names of layers that have adapters."""
    held = {name: tensor.to("cpu", copy=True) for name, tensor in adapters}
    for name, weight in weights:
        if name.removesuffix(WEIGHT) in targets:
            a, b = (held[each].to(weight.device) for each in adapter_names(name))
            magnitude = held.get(magnitude_name(name))
            weight = merged(weight, a, b, scale, None if magnitude is None else magnitude.to(weight.device))
        yield name, weight


class MergedWeights(LazyWeights):
    """What frozen weights and adapters of a checkpoint make together, each merged when it is looked up."""

    def __init__(self, base: State, adapters: State, config: LoraConfig) -> None:
        """Merge into `base` A and B by peft's names, and the changes of lengths of rows by those of lengths.

        Weights that were trained whole beside them take the places of theirs. Raises `ConfigError` for
        adapters of no weight of `base`."""
        self._base, self._adapters, self._config = base, adapters, config
        suffixes = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
        plain = {name.removeprefix(PREFIX) for name in adapters if not name.endswith(suffixes)}
        adapted = {adapter_names(name)[0] for name in base}
        if strangers := [name for name in adapters if name.endswith(suffixes[0]) and name not in adapted]:
            raise ConfigError(
                f"the checkpoint has {strangers[0].removeprefix(PREFIX)}, and the model no such weight: its "
                "adapters were trained on another one"
            )
        super().__init__(dict.fromkeys([*base, *sorted(plain)]))

    def __getitem__(self, name: str) -> Tensor:
        if PREFIX + name in self._adapters:
            return self._adapters[PREFIX + name]
        a, b = adapter_names(name)
        if a not in self._adapters:
            return self._base[name]
        weight = self._base[name].float()
        change = self._adapters.get(magnitude_name(name))
        magnitude = None if change is None else row_norms(weight) + change
        return merged(weight, self._adapters[a], self._adapters[b], self._config.scale, magnitude)

    def spec(self, name: str) -> Spec:
        if PREFIX + name in self._adapters:
            return spec_of(self._adapters, PREFIX + name)
        found = spec_of(self._base, name)
        return found._replace(dtype=torch.float32) if adapter_names(name)[0] in self._adapters else found


def row_norms(weight: Tensor) -> Tensor:
    """Return the length of each row, float32 [rows]."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    return norms


@torch.no_grad()
def squared_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the squared length of each row of W, and of W + scale * B A: float32 [2, rows].

    Of columns that ranks share it is a part, to be added up. W may have rows in several dimensions. All is
    float32, as in `merged`, and on a GPU no float32 copy of W is made."""
    before = torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float32).square().flatten()
    a32, b32 = a.float(), b.float()
    across = (_float32_product(weight.flatten(0, -2), a) * b32).sum(-1)
    added = ((b32 @ (a32 @ a32.t())) * b32).sum(-1)
    return torch.stack((before, before + 2 * scale * across + scale**2 * added))


def _float32_product(weight: Tensor, a: Tensor) -> Tensor:
    """Return W A^T, float32 [rows, rank], of the exact products of their elements."""
    if weight.is_cuda and weight.dtype == a.dtype != torch.float32:
        return torch.mm(weight, a.t(), out_dtype=torch.float32)
    return F.linear(weight.float(), a.float())


def excess(squares: Tensor, change: Tensor) -> Tensor:
    """Return what a row's length makes of its outputs, less 1: (|W| + change) / |W + scale * B A| - 1.

    Only `change`, by which the length of a row differs from that of W, has a gradient (arXiv:2402.09353,
    section 4.3). What is close to 1 would lose the change in bfloat16. `squares` is what `squared_norms`
    returns, and `change` is [rows]."""
    before, after = squares.clamp(min=0).sqrt().unbind()
    return (before - after + change.float()) / after.clamp(min=SMALLEST_NORM)


class FrozenBase:
    """The weights under adapters: the lengths of their rows, and what checkpoints of the adapters say of
    them. Each is computed once."""

    def __init__(self, config: LoraConfig, weights: State, dtype: torch.dtype) -> None:
        """Take the weights as `dtype`, in which they are computed with."""
        self.weights = weights
        self._config, self._dtype = config, dtype
        self._norms: dict[str, Tensor] = {}

    def magnitude(self, weight: str, change: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the lengths that the rows of an adapted weight have, float32 [rows], from their change: of
        all its rows, or of those with these numbers."""
        if weight not in self._norms:
            self._norms[weight] = row_norms(self.weights[weight].to(self._dtype))
        norms = self._norms[weight] if rows is None else self._norms[weight][rows]
        return norms.to(change.device) + change.float()

    def saved(self) -> dict[str, JsonValue]:
        """Return what must be the same where a checkpoint of the adapters is loaded."""
        return {**saved_settings(self._config), "base": self._digest}

    @cached_property
    def _digest(self) -> str:
        """Digest of the first row of each weight: it tells models apart, and takes no reading of all."""
        digest = xxh3_128()
        for name in sorted(self.weights):
            has_rows = spec_of(self.weights, name).shape
            first = part_of(self.weights, name, 0, 0, 1) if has_rows else self.weights[name]
            digest.update(name.encode() + bytes(tensor_bytes(first)))
        return digest.hexdigest()


def refuse_adapters_alone(directory: Path) -> NoReturn:
    """Raise `ConfigError` for a checkpoint that somebody takes for a model's weights."""
    raise ConfigError(
        f"checkpoint {directory} has adapters alone (learner.lora), no weights: name the directory that the "
        "run exported, which has both together"
    )


def refuse_other_adapters(
    directory: Path, saved: Mapping[str, Any] | None, ours: Mapping[str, Any] | None
) -> None:
    """Raise `ConfigError` where a checkpoint has other adapters, or on another model, than the run trains."""
    if saved == ours:
        return
    unset = saved_settings(NO_LORA)  # of settings that there were not yet
    saved, ours = {**unset, **saved} if saved else {}, ours or {}
    if saved == ours:
        return
    other = sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name))
    if not saved:
        what = "without adapters (learner.lora.rank=0)"
    elif other == ["base"]:
        what = "with adapters of a model with other weights"
    else:
        what = "with " + ", ".join(
            f"learner.lora.{name}={saved.get(name)}" for name in other if name != "base"
        )
    raise ConfigError(
        f"checkpoint {directory} was trained {what}: keep learner.lora and the model as they were, or "
        "start a new run with --model.path"
    )
