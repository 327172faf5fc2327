"""The ledger of leases, and which groups a step samples from it."""
