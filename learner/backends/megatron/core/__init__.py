"""Megatron-core as it is imported here, with and without CUDA; its process groups."""
