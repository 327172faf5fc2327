"""How far a run has come, and the lineage of its steps."""
