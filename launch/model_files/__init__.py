"""Where a run's model is, of the hub or on disk, and what its files say."""
