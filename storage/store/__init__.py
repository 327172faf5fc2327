"""The replay store: segments, index, late rewards, complete groups, archive, retention."""
