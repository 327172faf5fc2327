"""Programs that play environments of others in the Python of these."""
