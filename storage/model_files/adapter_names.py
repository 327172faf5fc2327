"""Tells under which names peft's files have the low-rank adapter of a weight."""

from collections.abc import Iterable

PREFIX = "base_model.model."
"""Begins the names of all tensors of an adapter."""
WEIGHT = ".weight"


def are_adapters(names: Iterable[str]) -> bool:
    """Tell whether tensors of these names are adapters, and not whole weights."""
    return all(name.startswith(PREFIX) for name in names)


def magnitude_name(weight: str) -> str:
    """Return the name of the lengths of its rows that belong to the weight of a linear layer (DoRA)."""
    return f"{PREFIX}{weight.removesuffix(WEIGHT)}.lora_magnitude_vector"


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of A and B that belong to the weight of a linear layer."""
    module = weight.removesuffix(WEIGHT)
    return f"{PREFIX}{module}.lora_A{WEIGHT}", f"{PREFIX}{module}.lora_B{WEIGHT}"
