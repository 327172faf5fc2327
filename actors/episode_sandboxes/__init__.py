"""Sandboxes that episodes have for any program: the contract, back ends, the pool."""
