"""Makes a model of transformers compute in exact arithmetic, and refuses those of which that is not known.

Modules without parts (linear layers, norms, activations, rotary embeddings) find exact functions in place of
torch's; attention is a kind of its own, which the caller names. What models compute between these are sums
and products of numbers, and copies. A pass at the start looks at every operation for others."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bus.errors import ConfigError
from storage.exact_arithmetic import functions
from storage.exact_arithmetic.self_check import refuse_other_arithmetic
from storage.exact_arithmetic.softmax import refuse_vocabulary
from storage.exact_arithmetic.sums import IntegerWeight

if (
    TYPE_CHECKING
):  # transformers' models take a second to load, which a learner of megatron-core has no use for
    from transformers import PreTrainedModel

MOVES = {
    "_to_copy", "_unsafe_view", "alias", "arange", "cat", "clone", "copy_", "detach", "embedding", "empty",
    "expand", "index", "index_select", "lift_fresh", "ones", "permute", "select", "slice", "split", "squeeze",
    "stack", "t", "transpose", "unsqueeze", "view", "zeros", "full", "item", "_local_scalar_dense",
    "new_zeros", "index_copy", "scalar_tensor", "unbind", "zeros_like", "ones_like", "constant_pad_nd",
    "is_pinned", "_pin_memory",
}  # fmt: skip
"""Operations of torch that copy numbers or make constants."""
ROUNDED_ONCE = {"add", "sub", "rsub", "mul", "div", "neg", "reciprocal", "abs", "pow", "add_", "mul_", "sub_"}
"""Operations of torch on single numbers that IEEE 754 leaves no choice. Of powers only squares are."""


class ExactFunctions(TorchFunctionMode):
    """Has modules call exact functions in place of torch's."""

    def __init__(self, *, keeps_weights: bool) -> None:
        """With `keeps_weights`, linear layers keep their weights as integers until `forget_weights`."""
        super().__init__()
        self._kept: dict[int, IntegerWeight] | None = {} if keeps_weights else None
        self._exact: dict[Any, Callable[..., Any]] = {
            torch.nn.functional.linear: self._linear,
            torch.nn.functional.silu: _silu,
            torch.rsqrt: functions.rsqrt,
            Tensor.rsqrt: functions.rsqrt,
            Tensor.cos: functions.cos,
            Tensor.sin: functions.sin,
            torch.cos: functions.cos,
            torch.sin: functions.sin,
            Tensor.mean: _mean,
            torch.mean: _mean,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the exact function, where there is one."""
        return self._exact.get(func, func)(*args, **(kwargs or {}))

    def forget_weights(self) -> None:
        """Have linear layers look at their weights again, which have changed."""
        if self._kept is not None:
            self._kept = {}

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._kept is None:
            return functions.linear(x, weight, bias)
        with functions.exactly():
            if id(weight) not in self._kept:  # a parameter of the model, which outlives this
                self._kept[id(weight)] = IntegerWeight(weight)
            found = self._kept[id(weight)].product(x)
            return found if bias is None else found + bias


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return functions.silu(x)


def _mean(x: Tensor, *dims: Any, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor:
    if (dims[0] if dims else dim) in (-1, (-1,), [-1]) and keepdim and not others:
        return functions.mean(x)
    given: Any = x  # which of torch's forms it is does not matter here
    found: Tensor = given.mean(*dims, **({} if dim is None else {"dim": dim}), keepdim=keepdim, **others)
    return found


def make_exact(
    model: "PreTrainedModel", forward: Callable[[], object], *, keeps_weights: bool = False
) -> ExactFunctions:
    """Have a float32 model compute in exact arithmetic from now on.

    Args:
        model: its attention is exact already.
        forward: computes log-probs of a few tokens with it; only its operations matter.
        keeps_weights: as `ExactFunctions` takes it.
    Raises `ConfigError` for machines whose arithmetic is another, and for models with operations that may
    depend on the rest of a batch."""
    refuse_other_arithmetic(model.device)
    config = model.config
    if config.get_text_config() is not config:
        raise ConfigError(
            f"model.numerics=exact is for text alone, and a {config.model_type} has other parts: set "
            "model.numerics=fast"
        )
    refuse_vocabulary(config.vocab_size)
    exact = ExactFunctions(keeps_weights=keeps_weights)
    for module in model.modules():
        if not list(module.children()):
            module.forward = _under(exact, module.forward)
    refuse_other_operations(forward, type(model).__name__)
    exact.forget_weights()
    return exact


def refuse_other_operations(forward: Callable[[], object], name: str) -> None:
    """Raise `ConfigError` for operations of a pass that may depend on the rest of a batch."""
    with torch.no_grad(), _Audit() as audit:
        forward()
    if audit.others:
        raise ConfigError(
            f"model.numerics=exact does not know {', '.join(sorted(audit.others))}, which {name} computes: "
            "the result may depend on the other tokens of a batch; set model.numerics=fast, or train a dense "
            "model such as Qwen3 or Llama"
        )


def _under(mode: TorchFunctionMode, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return run


class _Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Notes operations outside of exact functions that may depend on more than one number of each operand."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        is_single = name in MOVES | ROUNDED_ONCE and (name != "pow" or args[1] == 2)
        if not functions.is_exact() and not is_single:
            self.others.add(f"torch.ops.aten.{name}")
        return func(*args, **(kwargs or {}))
