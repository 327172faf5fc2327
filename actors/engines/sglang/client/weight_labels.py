"""What a server calls its weights: their policy version, and the process that gave them to it."""

import secrets

from bus.errors import EngineError

OWNER = secrets.token_hex(4)
"""Tells the weights of this process from those of the same number that another one gives the same server."""


class OtherWeightsError(EngineError):
    """The server has other weights than it was given, nobody knows since when."""


def weights_label(policy_version: int) -> str:
    """Return what the server is to call weights that this process gives it."""
    return f"{policy_version}.{OWNER}"


def version_of(label: object) -> int:
    """Return the policy version of weights. Raises `OtherWeightsError` for those of another process."""
    version, _, owner = str(label).partition(".")
    if owner != OWNER:
        raise OtherWeightsError(
            f"the server computes with weights {label!r}, which are not of this actor: it was started again, "
            "or another process gives it weights, while a server takes one actor of one run"
        )
    return int(version)
