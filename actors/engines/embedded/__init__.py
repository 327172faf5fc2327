"""The batched decoder over transformers."""
