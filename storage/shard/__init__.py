"""The process around a store: checks of what arrives, group status, the ledger asked over the bus."""
