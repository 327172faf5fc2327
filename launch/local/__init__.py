"""`launch local` and its supervisor."""
