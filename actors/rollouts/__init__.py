"""The worker: leases, groups of rollouts, failures, what is handed on at the end."""
