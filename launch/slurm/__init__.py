"""`launch slurm`: a run as jobs of a Slurm cluster."""
