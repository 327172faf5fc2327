"""Tensors, deltas, blobs and the transports that carry them."""
