"""The alarm of steps from which nothing can be learnt names what their trajectories have in common."""

from dataclasses import replace

import pytest

from learner.data.batches import make_step_batch, recorded_samples
from learner.metrics.alarms import STEPS, LearningAlarm
from learner.metrics.step_metrics import batch_values
from tests.factories import make_trajectory

ZERO, EQUAL, MIXED = (0.0, 0.0), (0.5, 0.5), (0.0, 1.0)


def values(*groups, end: str = "completed", **parts: float):
    """The metrics of a step whose groups have these rewards."""
    made = [
        [
            replace(
                make_trajectory(lease, n, group_size=len(rewards), reward=reward),
                end=end, reward_components=parts,
            )
            for n, reward in enumerate(rewards)
        ]
        for lease, rewards in enumerate(groups)
    ]  # fmt: skip
    advantages = [[0.0] * len(group) for group in made]
    return batch_values(make_step_batch(made, recorded_samples(made), advantages, policy_version=1))


def after(*steps) -> str:
    alarm = LearningAlarm()
    for step, found in enumerate(steps, 1):
        alarm.look(step, found)
    return alarm.text


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (values(ZERO, ZERO), ["each reward was 0 in 3 steps in a row: the tasks are too hard"]),
        (values(ZERO, EQUAL), ["the rewards within each group were equal in 3 steps in a row: "]),
        (
            values(MIXED, end="length"),
            ["the last answer of each rollout was cut off at its longest length in 3 steps"],
        ),
        (values(ZERO, end="length"), ["of each rollout was cut off", "each reward was 0"]),
        (values(MIXED, right=0.5, Format_tags=0.0), ["Format_tags, a part of the reward, was 0 for each"]),
        (values(MIXED, penalty=0.0, format=0.1), []),
        (values(MIXED, format_penalty=0.0), []),
        (values((0.5,), (0.7,)), []),  # groups of one
        (values(MIXED, ZERO, EQUAL), []),
        (values(), []),
    ],
)
def test_what_three_steps_have_in_common_is_told(step, told: list[str]):
    found = after(*[step] * STEPS)
    assert all(one in found for one in told)
    assert found.count(f"in {STEPS} steps in a row: ") == len(told)
    assert after(*[step] * (STEPS - 1)) == ""


def test_it_is_over_with_the_first_step_that_is_other_and_begins_anew_with_a_resumed_learner():
    zero, mixed = values(ZERO), values(MIXED)
    assert after(zero, zero, mixed, zero, zero) == ""
    assert after(zero, zero, mixed, zero, zero, zero) != ""
    alarm = LearningAlarm()
    for step in (4, 5, 3, 4):
        alarm.look(step, zero)
    assert alarm.text == ""
    alarm.look(5, zero)
    assert alarm.text.startswith("each reward was 0 in 3 steps in a row: ")


def test_a_held_out_loss_that_rises_three_times_in_a_row_is_an_alarm_until_it_falls_or_the_stage_ends():
    alarm = LearningAlarm()
    for loss in (2.0, 1.5, 1.6, 1.7):
        alarm.look_at_heldout(loss)
        assert alarm.text == ""
    alarm.look_at_heldout(1.8)
    assert alarm.text.startswith("the held-out loss rose 3 times in a row, to 1.8: ")
    alarm.look_at_heldout(1.75)
    assert alarm.text == ""
    for loss in (1.8, 1.9, 2.0):
        alarm.look_at_heldout(loss)
    assert alarm.text
    alarm.look(1, values(MIXED))  # reinforcement learning has begun
    assert alarm.text == ""
