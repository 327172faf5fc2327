"""Lets megatron-core run on a machine without CUDA.

megatron-core 0.16.1 names its device in the code: `torch.cuda.current_device()`, `tensor.cuda()`,
`device="cuda"`, `tensor.type() == "torch.cuda.FloatTensor"`. PyTorch has a `torch.cpu` and a `Tensor.cpu` of
the same shape, so it is enough that the functions of a few modules say `cpu` where they say `cuda`: here the
names and constants of their code objects are replaced. It also has torch compile functions, left here
as they are: to load torch's compiler takes a second, and to run it many. Nothing in torch stays touched."""

import importlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from bus.errors import ConfigError

MEGATRON_VERSION = "0.16.1"
MODULES_NAMING_CUDA = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.models.common.language_module.language_module",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.utils",
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.utils",
)
CPU_FOR = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
EXPECTED_IMPORT_WARNINGS = (
    r"`torch\.jit\.script",
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"The following imports from `dynamic_context\.py` will be removed",
    r"[\s\S]*'megatron\.core\.transformer\.custom_layers\.transformer_engine'",
)


@cache
def adapt_megatron_to_cpu() -> None:
    """Make megatron-core say `cpu` where it says `cuda`; does nothing where CUDA exists.

    Call it before anything else imports `megatron.core`; calling it again is harmless. Raises
    `ConfigError` when the installed megatron-core is not the one this was written for."""
    if torch.cuda.is_available():
        return
    with megatron_import_warnings_silenced(), _little_loaded():
        found = importlib.import_module("megatron.core").__version__
    if found != MEGATRON_VERSION:
        raise ConfigError(
            "learner/backends/megatron/core/patches.py adapts "
            f"megatron-core {MEGATRON_VERSION} to machines without CUDA, found {found}: "
            f"install megatron-core=={MEGATRON_VERSION}"
        )
    with megatron_import_warnings_silenced(), _little_loaded():
        modules = [importlib.import_module(name) for name in MODULES_NAMING_CUDA]
    for module in modules:
        if not sum(_adapt(function) for function in _functions(module)):
            raise ConfigError(
                f"{module.__name__} names no CUDA device: "
                "drop it from learner/backends/megatron/core/patches.py"
            )
    _use_the_cpu_generator()


def _use_the_cpu_generator() -> None:
    """Let recomputation save and restore the only generator there is."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        if not hasattr(random, name):
            raise ConfigError(
                f"{random.__name__} has no {name}: mend learner/backends/megatron/core/patches.py"
            )
    random._get_cuda_rng_state = lambda **_: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, **_: torch.set_rng_state(state)


@contextmanager
def megatron_import_warnings_silenced() -> Iterator[None]:
    """Silence what importing megatron-core always says without Transformer Engine and Apex."""
    with warnings.catch_warnings():
        for message in EXPECTED_IMPORT_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def _little_loaded() -> Iterator[None]:
    """Let what is imported take a decorator that does nothing for torch.compile, and do without wandb.

    megatron-core's inference would load wandb, which takes half a second. A sink of metrics loads it when
    there is one."""
    compiles = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    hidden = "wandb" not in sys.modules
    if hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # as importlib documents it
    try:
        yield
    finally:
        torch.compile = compiles
        if hidden:
            del sys.modules["wandb"]


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    members = [m for m in vars(module).values() if getattr(m, "__module__", None) == module.__name__]
    methods = [method for m in members if isinstance(m, type) for method in vars(m).values()]
    for member in [*members, *methods]:
        function = inspect.unwrap(getattr(member, "__func__", member))
        if isinstance(function, FunctionType):
            yield function


def _adapt(function: FunctionType) -> bool:
    if "is_available" in function.__code__.co_names:  # this function asks itself whether there is CUDA
        return False
    adapted = _without_cuda(function.__code__)
    changed = adapted != function.__code__
    function.__code__ = adapted
    return bool(changed)


def _without_cuda(constant: Any) -> Any:
    if isinstance(constant, str):
        return CPU_FOR.get(constant, constant)
    if isinstance(constant, tuple):
        return tuple(_without_cuda(item) for item in constant)
    if isinstance(constant, CodeType):
        return constant.replace(
            co_consts=_without_cuda(constant.co_consts), co_names=_without_cuda(constant.co_names)
        )
    return constant
