"""Attention of every kind, over packed sequences and context ranks."""
