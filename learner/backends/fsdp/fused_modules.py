"""Has parts of a model of transformers computed in one kernel each, where transformers takes many.

Norms, gates and rotary embeddings are recognised by what they compute of a few random numbers, so that a
family needs no entry here. What is not recognised stays as it is."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.backends.fused.functions import ACTIVATIONS, SILU, gated, gated_halves, rms_norm, rotated
from learner.distributed.process_group import device

OTHER_KIND = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, AssertionError)
"""What a module raises that does not take the numbers by which others are recognised: it is another."""
MLP = ("gate_proj", "up_proj", "down_proj")
"""Names of the layers of a gated MLP."""
ROTATE = "apply_rotary_pos_emb"
"""Name in transformers of the functions that rotate queries and keys."""
RENAMING = "transformers.utils.deprecation"
"""Module of the decorators that may be left out, since they rename arguments that nobody gives here."""


def are_wanted() -> bool:
    """Tell whether parts are to be fused here: on GPUs, where memory is what these parts wait for."""
    return device().type == "cuda"


class FusedModules:
    """The parts of a model that are fused."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Change those modules of a model that are recognised, and no other module of their classes. Call
        this before layers are wrapped by others. Weights may mean nothing yet."""
        self._on = True
        self.norms = self.gates = self.rotations = 0
        for module in model.modules():
            if (activation := _gated_experts(module)) is not None:  # also of experts that have adapters
                module._apply_gate = partial(self._gated, module._apply_gate, activation)
                self.gates += 1
            elif "forward" in vars(module):
                continue  # somebody else has changed the module
            elif (centred := _norm_kind(module)) is not None:
                module.forward = partial(self._normed, module, module.forward, centred)
                self.norms += 1
            elif _is_gated_norm(module):
                module.forward = partial(self._normed_and_gated, module, module.forward)
                self.norms += 1
            elif (activation := _gated_mlp(module)) is not None:
                module.forward = partial(self._expanded, module, module.forward, activation)
                self.gates += 1
            elif (rotating := _rotating_forward(type(module).forward, self._rotated)) is not None:
                module.forward = MethodType(rotating, module)
                self.rotations += 1

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Leave everything to transformers while inside, where nothing may want a gradient."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def _normed(self, module: Any, own: Callable[..., Tensor], centred: bool, x: Tensor) -> Tensor:
        if not self._on or x.dtype != module.weight.dtype:
            return own(x)
        return rms_norm(x, module.weight, _eps(module), centred=centred)

    def _normed_and_gated(self, module: Any, own: Callable[..., Tensor], x: Tensor, gate: Tensor) -> Tensor:
        if not self._on or x.dtype != module.weight.dtype or gate.dtype != x.dtype:
            return own(x, gate)
        return gated_norm(x, gate, module.weight, _eps(module))

    def _expanded(self, module: Any, own: Callable[..., Tensor], activation: str, x: Tensor) -> Tensor:
        if not self._on:
            return own(x)
        found: Tensor = module.down_proj(gated(module.gate_proj(x), module.up_proj(x), activation))
        return found

    def _gated(self, own: Callable[..., Tensor], activation: str, gate_and_up: Tensor) -> Tensor:
        return gated_halves(gate_and_up, activation) if self._on else own(gate_and_up)

    def _rotated(
        self, own: Callable[..., Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: Any,
        **named: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Rotate queries [1, heads, T, d] and keys by angles [1, T, r]; leave what is called otherwise."""
        is_pack = cos.dim() == 3 and len(query) == len(cos) == 1 and query.dtype == cos.dtype
        if not self._on or others or named or not is_pack:
            return own(query, key, cos, sin, *others, **named)  # type: ignore[no-any-return]
        return rotated_pair(query, key, cos, sin)


def rotated_pair(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys, as transformers has them."""
    turned = (rotated(heads[0].transpose(0, 1), cos[0], sin[0]) for heads in (query, key))
    query, key = (heads.transpose(0, 1)[None] for heads in turned)
    return query, key


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return silu(gate) times the norm of x, as Qwen3-Next's linear attention has it behind each head."""
    return gated(gate, rms_norm(x, weight, eps, centred=False), SILU)


def _eps(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _norm_kind(module: torch.nn.Module) -> bool | None:
    """Return whether the weight of a root-mean-square norm is added to 1; None for other modules."""
    if (probe := _norm_probe(module, arguments=1)) is None:
        return None
    ours = partial(rms_norm, weight=probe.weight, eps=_eps(module))
    width = len(probe.weight)
    kinds = (each for each in (False, True) if _agree(probe.forward, partial(ours, centred=each), width))
    return next(kinds, None)


def _is_gated_norm(module: torch.nn.Module) -> bool:
    if (probe := _norm_probe(module, arguments=2)) is None:
        return False

    def apart(norm: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda both: norm(*both.chunk(2, -1))

    ours = partial(gated_norm, weight=probe.weight, eps=_eps(module))
    return _agree(apart(probe.forward), apart(ours), 2 * len(probe.weight))


def _norm_probe(module: torch.nn.Module, *, arguments: int) -> Any:
    """Return a copy of a module that may be a norm, of so many arguments, with a weight of random numbers."""
    weight, eps = module._parameters.get("weight"), _eps(module)
    if len(list(module.parameters())) != 1 or weight is None or weight.dim() != 1:
        return None
    if not isinstance(eps, float) or eps <= 0 or _arguments(module) != arguments:
        return None
    probe = copy.copy(module)
    probe._parameters = {"weight": torch.nn.Parameter(_numbers(len(weight), seed=1))}
    return probe


def _gated_mlp(module: Any) -> str | None:
    if not all(isinstance(getattr(module, each, None), torch.nn.Linear) for each in MLP):
        return None
    if not hasattr(module, "act_fn") or _arguments(module) != 1:
        return None
    gate, up, down = small = [_layer(*sizes) for sizes in ((6, 16, 0), (6, 16, 1), (16, 6, 2))]
    probe = copy.copy(module)
    probe._modules = {**module._modules, **dict(zip(MLP, small, strict=True))}
    return _activation(probe.forward, lambda x, activation: down(gated(gate(x), up(x), activation)), 6)


def _layer(inputs: int, outputs: int, seed: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(inputs, outputs, device="meta")  # which draws no numbers
    layer.weight = torch.nn.Parameter(_numbers(outputs, inputs, seed=seed))
    layer.bias = torch.nn.Parameter(_numbers(outputs, seed=seed))
    return layer


def _gated_experts(module: Any) -> str | None:
    """Return the activation of experts whose gate is the first half of what they make; None for others."""
    return _activation(module._apply_gate, gated_halves, 32) if hasattr(module, "_apply_gate") else None


def _activation(own: Callable[..., Tensor], ours: Callable[..., Tensor], width: int) -> str | None:
    return next((each for each in ACTIVATIONS if _agree(own, partial(ours, activation=each), width)), None)


def _arguments(module: torch.nn.Module) -> int:
    return len(inspect.signature(module.forward).parameters)


@torch.no_grad()
def _agree(own: Callable[..., Tensor], ours: Callable[..., Tensor], width: int) -> bool:
    """Tell whether transformers makes the same of numbers [3, width], small and large: some norms differ in
    where they add epsilon, and some functions are clamped."""
    return all(_equal(own, ours, size * _numbers(3, width)) for size in (1e-3, 1.0, 30.0))


def _equal(own: Callable[..., Any], ours: Callable[..., Tensor], *given: Tensor) -> bool:
    try:
        found = own(*given)
    except OTHER_KIND:
        return False
    if not isinstance(found, Tensor):
        return False
    expected = ours(*given)
    close = 1e-5 * float(expected.abs().max())
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=close)


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return random float32 numbers, the same at each call; the process's generator stays as it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rotating_forward(
    forward: Callable[..., Any], rotate: Callable[..., tuple[Tensor, Tensor]]
) -> FunctionType | None:
    """Return the forward pass of an attention that calls `rotate`, whose first argument is the function that
    it called before; None where it calls none, or one that rotates otherwise.

    It is the same code with other globals, so that the model's file and its other models stay as they are."""
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        if getattr(forward, "__globals__", {}).get("__name__") != RENAMING:
            return None
        forward = inner
    if not isinstance(forward, FunctionType) or ROTATE not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(ROTATE)
    if own is None or not _rotates_so(own):
        return None
    scope = {**forward.__globals__, ROTATE: partial(rotate, own)}
    changed = FunctionType(
        forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


@torch.no_grad()
def _rotates_so(own: Callable[..., Any]) -> bool:
    """Tell whether a function rotates as ours does, also where it takes fewer angles than a head is wide."""
    shapes = ((1, 3, 5, 8), (1, 2, 5, 8), (1, 5, 8), (1, 5, 8))
    given = [_numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    if not _equal(partial(_joined, own), partial(_joined, rotated_pair), *given):
        return False
    fewer = [*given[:2], *(angles[..., :4] for angles in given[2:])]
    try:
        own(*fewer)
    except OTHER_KIND:  # the function never takes fewer angles
        return True
    return _equal(partial(_joined, own), partial(_joined, rotated_pair), *fewer)


def _joined(rotate: Callable[..., tuple[Tensor, Tensor]], *given: Tensor) -> Tensor:
    return torch.cat(rotate(*given), 1)
