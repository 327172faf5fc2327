"""The model: layers, experts, heads, adapters."""
