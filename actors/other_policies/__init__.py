"""Frozen opponents, and policies that are trained beside the run's own."""
