"""Deltas of weights that one process encodes as a whole."""

import sys

from storage.weights.deltas import encode_tensors, joined_delta


def encode_delta(base, policy_version, tensors, threads=None, *, most_bytes=sys.maxsize):
    """The delta that makes `tensors` out of `base`; None if it has more than `most_bytes`."""
    encoded = encode_tensors(base, tensors, threads, most_bytes=most_bytes)
    return joined_delta(base, policy_version, tensors, [encoded], most_bytes=most_bytes)
