"""The APIs that the gateway speaks, as functions without state."""
