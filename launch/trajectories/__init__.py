"""The trajectories of a run as people read them: where they lie, the search, what became of each, export."""
