"""What the files and the bus of a run say of it: steps, state, settings, what waits for what."""
