"""The APIs that it speaks, as functions without state."""
