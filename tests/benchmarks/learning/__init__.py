"""`launch bench learning`: whole presets, with and without injected failures."""
