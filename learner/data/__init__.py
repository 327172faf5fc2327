"""Batches, packing, trees of common prefixes, balancing over ranks."""
