"""Nothing but these rooms, each above those that it imports."""
