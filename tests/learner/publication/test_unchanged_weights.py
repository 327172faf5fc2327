"""An unchanged version says what is known of its step, and not what may be."""

import numpy as np
import pytest

from learner.backends.contract.backend import StepResult
from learner.data.batches import make_step_batch, recorded_samples
from learner.publication.unchanged_weights import why_unchanged
from tests.factories import make_trajectory


def batch(*groups):
    """The batch of a step whose groups have these rewards."""
    made = [
        [
            make_trajectory(lease, n, group_size=len(rewards), reward=reward)
            for n, reward in enumerate(rewards)
        ]
        for lease, rewards in enumerate(groups)
    ]
    advantages = [[0.0] * len(group) for group in made]
    return make_step_batch(made, recorded_samples(made), advantages, policy_version=1)


def result(**changes):
    given = {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-5, "tokens": 9, "computed_tokens": 9, "denominator": 9.0}
    return StepResult(**{**given, "skipped": False, "diagnostics": {}, **changes})


DIFFERENT = ((0.0, 1.0), (0.5, 0.5))


@pytest.mark.parametrize(
    ("rewards", "changes", "told"),
    [
        (DIFFERENT, {"skipped": True}, "the step was skipped: its loss or its gradient was not finite"),
        (DIFFERENT, {"lr": 0.0}, "the learning rate of the step was 0"),
        (((0.0, 0.0), (0.0, 0.0)), {}, "each of the step's 4 rewards was 0, and nothing was learnt"),
        (((1.0, 1.0), (0.1 + 0.2, 0.3)), {}, "the rewards within each of the step's 2 groups were equal"),
        (DIFFERENT, {"grad_norm": 0.0}, "the gradient of the step was 0"),
        (
            DIFFERENT,
            {},
            "the step had a gradient of norm 1 and the learning rate 1e-05: its change is too small",
        ),
    ],
)
def test_what_is_known_of_the_step_is_told(rewards, changes, told):
    assert why_unchanged(batch(*rewards), result(**changes)).startswith(told)


def test_groups_are_counted_by_their_rewards():
    found = batch((0.0, 0.0), (0.0, 1.0), (0.7, np.nextafter(0.7, 1)))
    assert (found.groups, found.equal_groups, found.zero_rewards, found.trajectories) == (3, 2, 3, 6)
