"""Runs from a program or a notebook."""
