"""What SGLang lacks on a machine without CUDA, put right as its modules are loaded.

torchvision's wheel has operators linked against CUDA, which cannot load beside a CPU build of torch; it also
registers fakes for two of them, for which their schemas must exist. They are declared when torchvision is
first looked for. Mooncake, by which a prefill server sends, is linked against RDMA's library. SGLang would
register the memory in which it keeps routed experts with CUDA, to copy faster, copy the places of what a
prefill server sends beside the device's work, and pin memory to copy which request has which adapter."""

import ctypes
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for name in ("nms", "qnms"):
                schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                self.library.define(schema)  # type: ignore[no-untyped-call]
            sys.modules[__name__].kept = self  # type: ignore[attr-defined]  # as long as the operators
        return None


class _LoadVerbs(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "mooncake.engine":
            sys.meta_path.remove(self)
            try:
                ctypes.CDLL("libibverbs.so.1")
            except OSError:  # ours, which knows of no devices
                ctypes.CDLL(str(Path(sys.prefix, "lib", "libibverbs.so.1")))
        return None


class _ChangeOnceLoaded(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)  # by the finders after this one
        if spec is not None and (loader := spec.loader) is not None:
            run = loader.exec_module

            def run_and_change(module: ModuleType) -> None:
                run(module)
                self._change(module)

            loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def _leave_memory_unregistered(module: ModuleType) -> None:
    module._cuda_host_register = lambda *_: None  # type: ignore[attr-defined]


def _copy_places_at_once(module: ModuleType) -> None:
    module.MooncakeKVSender.supports_host_tensor_indices = False


def _leave_memory_unpinned(module: ModuleType) -> None:
    """Have torch make what it is asked to pin like all else: without CUDA it raises an error."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    for name in ("tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))


sys.meta_path[:0] = [
    _DeclareOperators(),
    _LoadVerbs(),
    _ChangeOnceLoaded("sglang.srt.mem_cache.pool_host.common", _leave_memory_unregistered),
    _ChangeOnceLoaded("sglang.srt.disaggregation.mooncake.conn", _copy_places_at_once),
    _ChangeOnceLoaded("sglang.srt.lora.layers", _leave_memory_unpinned),
]
