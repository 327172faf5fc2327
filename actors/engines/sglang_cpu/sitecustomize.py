"""Lets `import torchvision` succeed beside a CPU build of torch, and SGLang return routed experts there.

torchvision's wheel has operators linked against CUDA, which cannot load there; it also registers fakes for
two of them, for which their schemas must exist. They are declared when torchvision is first looked for.
SGLang would register the memory in which it keeps routed experts with CUDA, to copy faster."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


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


class _LeaveMemoryUnregistered(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "sglang.srt.mem_cache.pool_host.common":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)  # by the finders after this one
        if spec is not None and (loader := spec.loader) is not None:
            run = loader.exec_module

            def run_and_replace(module: ModuleType) -> None:
                run(module)
                module._cuda_host_register = lambda *_: None  # type: ignore[attr-defined]

            loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


sys.meta_path[:0] = [_DeclareOperators(), _LeaveMemoryUnregistered()]
