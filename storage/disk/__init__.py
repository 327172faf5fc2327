"""Atomic files, the run directory, checkpoint directories."""
