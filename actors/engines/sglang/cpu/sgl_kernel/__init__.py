"""Stands in for SGLang's kernels on a CPU that they are not built for: each raises by name when called.

The `torch_native` attention and `pytorch` sampling back ends call none of them."""

from typing import NoReturn

__version__ = "0.0.0+none"


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"the SGLang kernel sgl_kernel.{name} has no stand-in on this CPU")

    missing.__name__ = name
    return missing
