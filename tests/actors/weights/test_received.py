"""From the learner's publisher to an engine: deltas, snapshots, and what becomes of wrong ones."""
