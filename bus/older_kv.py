"""Tokens that were sampled over keys and values of older weights than those that sampled them.

An engine that takes new weights in the middle of a generation may keep the keys and values that it has. Later
tokens are then of the new version, over keys and values that no model of one version computes. Each array
`kv_versions`, int32 [N], says for N tokens the oldest version whose weights may have computed a key or value
that the token looked at. A token is fresh where that is its own version. Messages and segments hold the runs
of tokens that are not fresh, most often none."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bus.errors import SchemaError

Versions = NDArray[np.int32]
RUN = np.dtype([("start", "<i4"), ("stop", "<i4"), ("version", "<i4")])
"""Tokens from `start` to before `stop`, and the oldest version of the keys and values behind them."""


def older_kv_bytes(kv_versions: Versions | None, policy_versions: Versions) -> bytes:
    """Return the runs of tokens whose keys and values are of another version, as bytes of `RUN`.

    Args:
        kv_versions: [N], or None where all tokens are fresh.
        policy_versions: [N], the weights that sampled each token; -1 where none did."""
    if kv_versions is None:
        return b""
    marks = np.where(kv_versions == policy_versions, np.int32(-1), kv_versions)
    edges = np.flatnonzero(np.diff(marks, prepend=-1, append=-1))
    runs = [(start, stop, marks[start]) for start, stop in pairwise(edges)]
    return np.array([run for run in runs if run[2] >= 0], RUN).tobytes()


def kv_versions_from(runs: bytes, policy_versions: Versions) -> Versions | None:
    """Return what `older_kv_bytes` was given; None where all tokens are fresh."""
    if not runs:
        return None
    found = policy_versions.astype(np.int32)
    for start, stop, version in np.frombuffer(runs, RUN).tolist():
        found[start:stop] = version
    return found


def joined_kv_versions(parts: list[tuple[Versions | None, Versions]]) -> Versions | None:
    """Return the versions of tokens that follow one another, each part with its `policy_versions`."""
    if all(kv is None for kv, _ in parts):
        return None
    return np.concatenate([versions if kv is None else kv for kv, versions in parts])


def check_older_kv(name: str, runs: bytes, policy_versions: Versions) -> None:
    """Raise `SchemaError` for runs that do not lie one after the other among sampled tokens."""
    if not runs:
        return
    if len(runs) % RUN.itemsize:
        raise SchemaError(f"{name}: {len(runs)} bytes of older keys and values, in runs of {RUN.itemsize}")
    end = 0
    for start, stop, version in np.frombuffer(runs, RUN).tolist():
        if not end <= start < stop <= len(policy_versions) or version < 0:
            raise SchemaError(
                f"{name}: keys and values of version {version} behind tokens [{start}, {stop}) of "
                f"{len(policy_versions)}, after a run to {end}"
            )
        if policy_versions[start:stop].min() < 0:
            raise SchemaError(f"{name}: tokens [{start}, {stop}) over older keys were not all sampled")
        end = stop
