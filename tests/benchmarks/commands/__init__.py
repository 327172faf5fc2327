"""`launch bench`: importing these modules is what makes its commands known to `launch`."""

from benchmarks.commands import learning, length, numerics, off_policy, parts

__all__ = ["learning", "length", "numerics", "off_policy", "parts"]
