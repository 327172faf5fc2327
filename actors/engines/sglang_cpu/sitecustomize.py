"""Lets `import torchvision` succeed beside a CPU build of torch.

torchvision's wheel has operators linked against CUDA, which cannot load there; it also registers fakes for
two of them, for which their schemas must exist. They are declared when torchvision is first looked for."""

import importlib.abc
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


sys.meta_path.insert(0, _DeclareOperators())
