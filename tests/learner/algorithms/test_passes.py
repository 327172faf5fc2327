"""Log-probs of the policy before the step are computed where something needs them, and only there."""

from itertools import product

import pytest
from pydantic import ValidationError

from learner.algorithms.losses.objective import Objective
from learner.algorithms.selection import selections
from learner.config.batch import BatchConfig
from learner.config.frozen_policies import ReferenceConfig
from learner.config.learner import LearnerConfig
from tests.learner.choices import LOSSES, REJECTIONS, WEIGHING

OWN_RATIO = set(LOSSES) - {"reinforce", "ppo_clip"}


def objective_of(updates: int = 1, **settings: object) -> Objective:
    return Objective.of(LearnerConfig(batch=BatchConfig(updates=updates), **settings))


@pytest.mark.parametrize(
    ("settings", "updates", "policies"),
    [
        ({}, 1, ()),
        ({}, 4, ()),
        ({"loss": {"type": "ppo_clip"}}, 4, ()),
        ({"loss": {"type": "gspo"}}, 4, ()),
        ({"loss": {"type": "vespo"}}, 4, ()),
        ({"correction": {"type": "sequence_tis"}}, 4, ()),
        ({"rejection": {"type": "token_range"}}, 4, ()),
        ({"loss": {"type": "ppo_clip", "centre": "proximal"}}, 1, ()),
        ({"loss": {"type": "ppo_clip", "centre": "proximal"}}, 2, ("proximal",)),
        ({"loss": {"type": "ppo_clip", "centre": "proximal", "proximal": "recomputed"}}, 1, ("proximal",)),
        ({"loss": {"type": "ppo_clip", "centre": "proximal", "proximal": "first_pass"}}, 1, ()),
        ({"loss": {"type": "ppo_clip", "centre": "proximal", "proximal": "interpolated"}}, 2, ()),
        ({"rejection": {"type": "second_moment"}}, 1, ("proximal",)),
        ({"loss": {"type": "clip_cov"}}, 1, ("proximal",)),
        ({"loss": {"type": "kl_cov"}}, 1, ("proximal",)),
        ({"loss": {"type": "kl_cov"}, "rejection": {"type": "second_moment"}}, 2, ("proximal",)),
        ({"reference": ReferenceConfig(kl_coef=0.1)}, 1, ("reference",)),
        (
            {
                "reference": ReferenceConfig(kl_coef=0.1),
                "loss": {"type": "ppo_clip", "centre": "proximal", "proximal": "interpolated"},
                "rejection": {"type": "second_moment"},
            },
            2,
            ("proximal", "reference"),
        ),
    ],
)
def test_old_log_probs_are_computed_where_something_needs_them(settings, updates, policies):
    assert objective_of(updates, **settings).policies == policies


def test_what_picks_tokens_over_an_update_has_a_stream_and_a_pass():
    for loss, rejection in product(set(LOSSES), (*REJECTIONS, "none")):
        learner = LearnerConfig(loss={"type": loss}, rejection={"type": rejection})
        objective = Objective.of(learner)
        assert set(objective.selected) == set(selections(learner))
        assert not objective.selected or "proximal" in objective.policies
    several = LearnerConfig(rejections={"a": {"type": "veto"}, "b": {"type": "second_moment"}})
    assert Objective.of(several).selected == tuple(selections(several)) == ("beyond_second_moment",)


def test_each_combination_is_accepted_or_refused_with_a_remedy():
    accepted = 0
    for loss, correction, rejection in product(
        set(LOSSES), ("auto", "none", *WEIGHING), ("none", *REJECTIONS)
    ):
        settings = {
            "loss": {"type": loss}, "correction": {"type": correction}, "rejection": {"type": rejection}
        }  # fmt: skip
        if correction in WEIGHING and loss in OWN_RATIO | {"ppo_clip"}:
            message = rf"correction\.type={correction} has no effect.*set it to none"
            with pytest.raises(ValidationError, match=message):
                LearnerConfig(**settings)
        else:
            objective = Objective.of(LearnerConfig(**settings))
            assert objective.loss_function
            accepted += 1
    assert accepted == 12 * 2 * 9 + 2 * 9  # auto and none with each, two corrections with REINFORCE


def test_a_source_of_the_proximal_policy_that_cannot_be_is_refused():
    decoupled = {"type": "ppo_clip", "centre": "proximal", "proximal": "first_pass"}
    with pytest.raises(ValidationError, match=r"updates=2.* set it to recomputed or interpolated"):
        objective_of(2, loss=decoupled)
    with pytest.raises(ValidationError, match=r"proximal=first_pass has no effect.*set centre=proximal"):
        objective_of(1, loss=decoupled | {"centre": "behaviour"})
