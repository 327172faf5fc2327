"""A choice of an algorithm is one record: settings that name a function and what others go by."""

import inspect
from functools import partial
from pkgutil import resolve_name
from typing import Annotated, ClassVar, Literal, get_args

import pytest
import torch
from pydantic import Field, ValidationError
from torch import Tensor

from bus.trajectory import Groups
from learner.algorithms.advantages.step_advantages import estimate_advantages
from learner.algorithms.losses.objective import Objective
from learner.algorithms.plugin import ARGUMENTS, OFFERED, chosen_function
from learner.algorithms.selection import Pick, selections
from learner.algorithms.tokens import LossTokens
from learner.config.advantage import AdvantageConfig, AdvantageEstimator
from learner.config.algorithm import Aggregation
from learner.config.correction import Correction, Rejection, UsedCorrection
from learner.config.learner import LearnerConfig
from learner.config.loss import Loss, LossFacts, UsedLoss
from learner.config.plugin import Choice, Picking
from tests.learner.algorithms.loss_inputs import leaf, tokens_of, worked_out
from tests.learner.algorithms.rewarded import group
from tests.learner.choices import RECORDS

CALLED_WITH = {
    Loss: ARGUMENTS["loss"],
    Correction: ARGUMENTS["correction"],
    Rejection: ("log_ratio", "logprobs", "advantages", "sequence"),
    AdvantageEstimator: ARGUMENTS["advantage"],
    Aggregation: ARGUMENTS["aggregation"],
}
EXAMPLES = {
    "constant": {"tokens": 1},
    "gdpo": {"rewards": {"format": 1.0}},
    "hierarchical": {"within_episode": ("solver",)},
}


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.model_fields["type"].default)
def test_the_function_of_a_record_takes_what_it_is_called_with(kind: type[Choice]):
    config = kind(**EXAMPLES.get(kind.model_fields["type"].default, {}))
    [base] = [base for base in CALLED_WITH if issubclass(kind, base)]
    picks = config.facts.picks if isinstance(config, Loss) else getattr(config, "picks", None)
    if picks is not None:
        picking = partial(resolve_name(picks.computed_by), **config.model_dump(include={*picks.settings}))
        inspect.signature(picking).bind(*get_args(Pick)[0])
    if not (issubclass(kind, Rejection) and picks):
        function = chosen_function("choice", config)
        offered = {name for name in OFFERED["advantage"] if name in inspect.signature(function).parameters}
        inspect.signature(function).bind(*CALLED_WITH[base], **dict.fromkeys(offered))


# --- who adds one of each ---


def steep_loss(tokens: LossTokens, *, factor: float) -> tuple[Tensor, dict[str, Tensor]]:
    return -factor * tokens.streams["advantages"] * tokens.logprobs, {}


class SteepLoss(Loss):
    type: Literal["steep"] = "steep"
    computed_by: ClassVar[str] = f"{__name__}:steep_loss"

    factor: float = 2.0


class PickingLoss(SteepLoss):
    type: Literal["picking"] = "picking"
    read_elsewhere: ClassVar[tuple[str, ...]] = ("picked_fraction",)
    stated: ClassVar[LossFacts] = LossFacts(
        by_sequence=False,
        picks=Picking("picked_by_covariance", "learner.algorithms.selection:kl_cov", ("picked_fraction",)),
    )

    picked_fraction: float = 0.5


def raw_rewards(groups: Groups, *, factor: float) -> list[list[float]]:
    return [[factor * trajectory.reward for trajectory in group] for group in groups]


class RawRewards(AdvantageEstimator):
    type: Literal["raw"] = "raw"
    computed_by: ClassVar[str] = f"{__name__}:raw_rewards"
    whitens: ClassVar[bool] = True
    takes_negative_rewards: ClassVar[bool] = False

    factor: float = 3.0


def first_half(
    log_ratio: Tensor, sequence: Tensor, *, weight: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return torch.full_like(log_ratio, weight), torch.arange(len(sequence)) < len(sequence) / 2, {}


class FirstHalf(Correction):
    type: Literal["first_half"] = "first_half"
    computed_by: ClassVar[str] = f"{__name__}:first_half"

    weight: float = 0.5


class Extended(LearnerConfig):
    """The learner's settings as they are after a name was added to each union."""

    loss: Annotated[UsedLoss | SteepLoss | PickingLoss, Field(discriminator="type")] = SteepLoss()
    correction: Annotated[
        get_args(LearnerConfig.model_fields["correction"].annotation)[0] | UsedCorrection | FirstHalf,
        Field(discriminator="type"),
    ] = FirstHalf()
    advantage: Annotated[get_args(AdvantageConfig)[0] | RawRewards, Field(discriminator="type")] = (
        RawRewards()
    )


def test_a_new_loss_is_corrected_and_computed_by_its_record():
    """The second token is 4 times as likely as when it was sampled: token TIS weighs it by 2."""
    new = Extended(loss={"type": "steep", "factor": 5.0}, correction={"type": "auto"})
    tokens = tokens_of(leaf(-1.0, -1.0), behaviour_logprobs=[-1.0, -1.0 - 2 * 0.6931472], advantages=1.0)
    _, gradient, _ = worked_out(Objective.of(new), tokens)
    assert gradient == pytest.approx([-5.0, -10.0], rel=1e-5)
    assert not Objective.of(new).is_separable
    picking = Extended(loss={"type": "picking"}, correction={"type": "auto"})
    assert list(selections(picking)) == ["picked_by_covariance"]
    assert Objective.of(picking).policies == ("proximal",)
    assert Objective.of(picking).is_separable


def test_a_new_correction_weighs_and_rejects_by_its_record():
    new = Objective.of(Extended(loss={"type": "reinforce"}, correction={"type": "first_half"}))
    tokens = tokens_of(leaf(-1.0, -1.0), behaviour_logprobs=-1.0, advantages=1.0)
    _, gradient, sums = worked_out(new, tokens)
    assert not new.is_separable
    assert gradient == pytest.approx([-0.5, 0.0])
    assert sums["rejected_by_correction_tokens"] == 1
    with pytest.raises(ValidationError, match=r"correction\.type=first_half has no effect with .*=gspo"):
        Extended(loss={"type": "gspo"}, correction={"type": "first_half"})


def test_a_new_advantage_is_computed_and_refused_by_its_record():
    new = Extended(advantage={"type": "raw", "factor": 7.0})
    assert estimate_advantages(new.advantage, [group(1.0, 0.5)]) == [[7.0, 3.5]]
    assert not new.has_critic
    with pytest.raises(ValidationError, match=r"advantage\.type=raw, which whitens by itself"):
        Extended(whiten_advantages=True)
    with pytest.raises(ValidationError, match=r"advantage\.type=raw needs rewards of at least 0"):
        Extended(overlong={"longest_tokens": 5})
