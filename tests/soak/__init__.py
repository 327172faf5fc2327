"""`launch soak`: faults and their account."""
