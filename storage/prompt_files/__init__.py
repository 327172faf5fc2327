"""Prompt files and hub data sets: read, checked, and kept on disk."""
