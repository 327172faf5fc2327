"""Directories of models: read lazily, written, quantised and back; the manifest of a checkpoint."""
