"""Ranks, their commands, hosts."""
