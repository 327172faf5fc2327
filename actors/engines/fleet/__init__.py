"""The engines of an actor as one: building, GPUs, failures, who joins and leaves."""
