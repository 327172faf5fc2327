"""Counters and averages of an actor, for screens and the run's record."""
