"""Finds weights that are not finite. A model with one of them answers nothing, and no update of it counts."""

from collections.abc import Iterable
from typing import Any, Protocol

from bus.errors import ConfigError
from storage.model_files.model_reading import AGAIN

SMALLEST_BYTES = 2
"""Bytes of an element of the types that are looked at. Numbers of 8 bits have no sum on a CPU, and scales of
wider types."""


class Weight(Protocol):
    """A tensor of torch, which storage does not load."""

    def is_floating_point(self) -> bool: ...
    def element_size(self) -> int: ...
    def detach(self) -> Any: ...


def not_finite(weights: Iterable[tuple[str, Weight]]) -> list[str]:
    """Return the names of tensors that hold NaN or infinity.

    A sum is computed on the tensor's device at the speed at which memory is read, and is finite where all of
    it is, unless it overflows. So elements are looked at where the sum is not."""
    broken = []
    for name, weight in weights:
        if weight.is_floating_point() and weight.element_size() >= SMALLEST_BYTES:
            values = weight.detach()
            if not (values.sum().isfinite() or values.isfinite().all()):
                broken.append(name)
    return broken


def refuse_not_finite(weights: Iterable[tuple[str, Weight]], where: object) -> None:
    """Raise `ConfigError` for weights that hold NaN or infinity in files of a model, which `where` names."""
    if broken := not_finite(weights):
        raise ConfigError(
            f"{where}: {len(broken)} weights hold NaN or infinity, such as {broken[0]}: {AGAIN}"
        )
