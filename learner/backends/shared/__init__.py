"""Adapters, packed attention, router replay, for every backend."""
