"""Loss of a micro-batch, skipping and clipping, counts of updates, for every backend."""
