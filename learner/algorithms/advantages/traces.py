"""Credit over the n actions of one trajectory from their rewards and a critic's values: GAE and V-trace.

After the last action comes a state of value 0: what a trajectory would have earned beyond its end, whatever
ended it, is what its reward says.
"""

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.tokens import LARGEST_LOG_RATIO

Floats = NDArray[np.float64]


def gae(rewards: Floats, values: Floats, *, discount: float, trace_decay: float) -> Floats:
    """Return the generalised advantage of each action, [n] (arXiv:1506.02438, eq. 16).

    With `discount` and `trace_decay` of 1 it is the sum of the rewards from the action on, less its value.

    Args:
        rewards: [n], given after each action.
        values: [n], of the state before each action.
        discount: factor of what comes an action later (gamma).
        trace_decay: weight of what comes later against the values (lambda).
    """
    surprises = rewards + discount * _next(values) - values
    return _summed_backwards(surprises, np.full(len(values), discount * trace_decay))


def vtrace(
    rewards: Floats, values: Floats, log_ratios: Floats, *,
    discount: float, trace_decay: float, rho_bar: float, c_bar: float,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return what the values should be, and the advantage of each action, [n] each (arXiv:1802.01561, eq. 1).

    The traces are c_t = `trace_decay` * min(`c_bar`, ratio) (remark 2). The advantage of an action is r +
    discount * q - V(x), where q is a mean of the next state's target, by `trace_decay`, and of its value; its
    importance weight is left to the correction of the loss. Where all ratios are 1, and so are the bounds or
    more, the advantages are those of `gae` and the targets those advantages on top of the values.

    Args:
        rewards: [n], given after each action.
        values: [n], of the state before each action.
        log_ratios: [n] nats, of the policy before the step over the one that sampled, of whole actions.
        discount: factor of what comes an action later (gamma).
        trace_decay: weight of what comes later against the values (lambda).
        rho_bar: upper bound on the weight of an action.
        c_bar: upper bound on the weight by which later actions count, at most 1.
    """
    ratios = np.exp(np.minimum(log_ratios, LARGEST_LOG_RATIO))
    surprises = rewards + discount * _next(values) - values
    traces = discount * trace_decay * np.minimum(c_bar, ratios)
    changes = _summed_backwards(np.minimum(rho_bar, ratios) * surprises, traces)
    return values + changes, surprises + discount * trace_decay * _next(changes)


def _next(values: Floats) -> Floats:
    """Return what belongs to the action after each; 0 after the last."""
    return np.append(values[1:], 0.0)


def _summed_backwards(terms: Floats, factors: Floats) -> Floats:
    """Return s, [n], where s[t] = terms[t] + factors[t] * s[t + 1]."""
    pairs = zip(terms[::-1].tolist(), factors[::-1].tolist(), strict=True)
    sums = accumulate(pairs, lambda later, pair: pair[0] + pair[1] * later, initial=0.0)
    return np.array([*sums][:0:-1])
