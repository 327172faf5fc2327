"""`launch bench`."""
