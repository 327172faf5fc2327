"""The configuration of a run, and where each setting comes from."""
