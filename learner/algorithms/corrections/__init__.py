"""Importance weights of tokens that another policy sampled."""
