"""`launch bench staleness`, `launch bench reuse`: learning from old data."""
