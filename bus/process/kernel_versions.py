"""Versions of the packages that compile the kernels which a SGLang server shares with the learner.

The server's own interpreter runs this file, so it imports nothing of Sluice."""

import json
import sys
from collections.abc import Mapping
from importlib import metadata

PACKAGES = ("sglang", "torch", "triton")
MISSING = "none"


def installed() -> dict[str, str]:
    """Return the version of each package in this environment, without the build that may follow it."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return MISSING


def differences(server: Mapping[str, str], learner: Mapping[str, str]) -> str:
    """Return which packages a server has in other versions than the learner, in words; empty for none."""
    return ", ".join(
        f"{name} {server.get(name, MISSING)} at the server and {version} at the learner"
        for name, version in learner.items()
        if server.get(name, MISSING) != version
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(installed()))
