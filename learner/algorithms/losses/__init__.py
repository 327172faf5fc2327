"""Losses, and the objective of a step."""
