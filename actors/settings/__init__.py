"""Settings of all rooms of `actors`; it loads without torch."""
