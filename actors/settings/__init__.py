"""Settings of all rooms of `actors`, which load without torch."""
