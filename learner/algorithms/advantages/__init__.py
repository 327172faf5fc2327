"""Advantages."""
