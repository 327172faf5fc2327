"""The actor process: what it starts, runs and shows."""
