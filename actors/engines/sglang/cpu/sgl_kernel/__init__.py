"""Stands in for SGLang's kernels on a CPU that they are not built for: each raises by name when called. The
`torch_native` attention and `pytorch` sampling back ends call none of them."""

from typing import NoReturn

import torch

__version__ = "0.0.0+none"
TAKEN_AT_IMPORT = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Operators that the module of Qwen3.5 has to find as it is imported. Without that module SGLang has no image
processor of Qwen's vision-language models, which call none of them."""


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"the SGLang kernel sgl_kernel.{name} has no stand-in on this CPU")

    missing.__name__ = name
    return missing


for _name in TAKEN_AT_IMPORT:
    setattr(torch.ops.sgl_kernel, _name, __getattr__(_name))
