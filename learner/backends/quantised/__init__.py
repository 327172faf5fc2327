"""The weights that quantised engines have, given to a model for a pass."""
