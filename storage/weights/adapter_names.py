"""Tells under which names peft's files have the low-rank adapter of a weight."""

PREFIX = "base_model.model."
"""Begins the names of all tensors of an adapter."""
WEIGHT = ".weight"


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of A and B that belong to the weight of a linear layer."""
    module = weight.removesuffix(WEIGHT)
    return f"{PREFIX}{module}.lora_A{WEIGHT}", f"{PREFIX}{module}.lora_B{WEIGHT}"
