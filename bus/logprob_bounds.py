"""Bounds of the log-probs that an engine can have drawn a token with."""

import numpy as np
from numpy.typing import NDArray

from bus.errors import SchemaError

SMALLEST_LOGPROB = -1e4
"""Least log-prob in nats that an engine may report. A softmax in float32 draws nothing below -104, and even a
token that a grammar forced is no further from the likeliest than logits can be."""
LARGEST_LOGPROB = 1e-2
"""Largest one: above 0 by no more than the rounding of half-precision logits."""


def refuse_impossible(logprobs: NDArray[np.float32], name: str, actor: str) -> None:
    """Raise `SchemaError` for log-probs that no engine can have drawn a token with.

    Args:
        logprobs: float32 [N] nats.
        name: names their tokens in the error.
        actor: who sent them."""
    for logprob in extremes(logprobs):
        if not SMALLEST_LOGPROB <= logprob <= LARGEST_LOGPROB:
            raise SchemaError(
                f"{name}: a behaviour log-prob is {logprob}, but no engine can have "
                f"drawn a token outside of {SMALLEST_LOGPROB} to 0 nats",
                kind="logprob",
                actor=actor,
            )


def extremes(values: NDArray[np.float32]) -> list[float]:
    """Return the least and the largest, none of no values; NaN is both."""
    # argmin and argmax take a third of the time of min and max
    return [float(values[values.argmin()]), float(values[values.argmax()])] if len(values) else []
