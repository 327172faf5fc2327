"""`launch soak --compressed`: samples of what a run uses, their fit, what is stated."""
