"""Limits of exact arithmetic that settings are checked against. Loads without torch."""

MOST_TOKENS = 2**16
"""Most tokens of a sequence, for attention adds up as many. One number for all sequences decides the bits of
weights and values, so that a longer one would make the sums of all others coarser."""
