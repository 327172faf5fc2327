"""Hugging Face names and layouts to Megatron's and back, one file a family."""
