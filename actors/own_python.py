"""The word of a command that stands for the Python that runs Sluice."""

import sys
from collections.abc import Sequence

OWN_PYTHON = "{python}"


def with_own_python(words: Sequence[str]) -> list[str]:
    """Return the words of a command with that Python in the place of `{python}`."""
    return [sys.executable if word == OWN_PYTHON else word for word in words]
