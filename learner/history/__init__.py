"""Training steps again, shadows, resuming."""
