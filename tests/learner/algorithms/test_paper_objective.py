"""What an objective is by default is that of the papers that its loss and its rejections are from."""

from dataclasses import replace
from math import inf
from typing import ClassVar, Literal, get_args

import numpy as np
import pytest
import torch

from launch.checks.start_checks import start_remarks
from launch.settings.run_config import resolve
from learner.algorithms.aggregation import aggregated
from learner.algorithms.losses.objective import Objective
from learner.config.algorithm import ConstantDenominator, SequenceMean, TokenMean
from learner.config.correction import NoCorrection, TokenTIS
from learner.config.learner import LearnerConfig
from learner.config.loss import Loss, LossFacts, PluginLoss, UsedLoss
from learner.run.service import say_objective
from tests.learner.algorithms.loss_inputs import leaf, tokens_of, worked_out
from tests.learner.choices import LOSSES
from tests.learner.tiny import random_samples

SEQUENCE_SUM = ConstantDenominator(tokens=1)
AGGREGATIONS = {
    "reinforce": TokenMean(),  # of no one paper
    "ppo_clip": TokenMean(),  # arXiv:1707.06347: the mean over time steps
    "gspo": SequenceMean(),  # arXiv:2507.18071, eq. 5: 1/G sum of min(s A, clip(s) A)
    "gmpo": SequenceMean(),  # arXiv:2507.20673: 1/G sum of the geometric means
    "sapo": SequenceMean(),  # arXiv:2511.20347: 1/G sum 1/|y| sum f(r) A
    "cispo": TokenMean(),  # arXiv:2506.13585, eq. 4: 1/(sum |o|) sum sum
    "aipo": TokenMean(),  # arXiv:2505.24034 leaves it open
    "topr": SEQUENCE_SUM,  # arXiv:2503.14286, eq. 8: the mean of log pi of whole sequences
    "vespo": TokenMean(),  # arXiv:2602.10693 leaves it open; its code has token-mean
    "regression": SEQUENCE_SUM,  # arXiv:2501.12599, 2.3.2: the mean of one square a sequence
    "clip_cov": TokenMean(),  # arXiv:2505.22617: the mean over tokens
    "kl_cov": TokenMean(),
}
REJECTIONS = {
    "token_range": (TokenTIS(truncation_cap=inf), SequenceMean()),  # IcePop: 1/G sum 1/|y| sum M(k), M(k) = k
    "binary_tv": (TokenTIS(truncation_cap=inf), TokenMean()),  # DPPO: sum of M r A
    "binary_kl": (TokenTIS(truncation_cap=inf), TokenMean()),
    "binary_kl_two_way": (TokenTIS(truncation_cap=inf), TokenMean()),
    "second_moment": (TokenTIS(truncation_cap=inf), TokenMean()),  # M2PO: 1/(sum |o|) sum M r A
    "sequence_range": (TokenTIS(), TokenMean()),  # masks that go with any objective
    "veto": (TokenTIS(), TokenMean()),
    "negative_divergence": (TokenTIS(), TokenMean()),
}


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_loss_has_the_aggregation_of_its_paper_unless_another_is_set(loss):
    learner = LearnerConfig(loss={"type": loss})
    assert learner.used_aggregation == AGGREGATIONS[loss]
    assert learner.differences_from_papers == []
    other = LearnerConfig(loss={"type": loss}, aggregation={"type": "prompt_mean"})
    assert other.used_aggregation.type == "prompt_mean"
    of_a_paper = loss not in ("reinforce", "ppo_clip", "aipo")
    assert len(other.differences_from_papers) == of_a_paper


def test_gspo_alone_trains_on_the_mean_over_sequences():
    """Two sequences of 1 and 3 tokens: GSPO's eq. 5 weighs them alike, token_mean 1 to 3."""
    samples = [replace(sample, loss_mask=np.ones(n, bool)) for n in (2, 4) for sample in random_samples([n])]
    for loss, weights in (("gspo", [1.0, 1 / 3]), ("reinforce", [1.0, 1.0])):
        weighed = aggregated(samples, LearnerConfig(loss={"type": loss}).used_aggregation)
        found = [sample.streams.get("loss_weights", 1.0) for sample in weighed]
        assert found == pytest.approx(weights)


@pytest.mark.parametrize("rejection", REJECTIONS)
def test_a_rejection_has_the_weights_and_the_aggregation_of_its_paper(rejection):
    learner = LearnerConfig(rejection={"type": rejection})
    assert (learner.used_correction, learner.used_aggregation) == REJECTIONS[rejection]
    named = LearnerConfig(rejections={"mine": {"type": rejection}})
    assert (named.used_correction, named.used_aggregation) == REJECTIONS[rejection]
    own = LearnerConfig(loss={"type": "gspo"}, rejection={"type": rejection})
    assert (own.used_correction, own.used_aggregation) == (NoCorrection(), SequenceMean())
    decoupled = {"type": "ppo_clip", "centre": "proximal"}
    assert (
        LearnerConfig(loss=decoupled, rejection={"type": rejection}).used_correction
        == (REJECTIONS[rejection][0])
    )


def test_icepop_weighs_a_kept_token_by_its_ratio_above_two():
    objective = Objective.of(LearnerConfig(rejection={"type": "token_range"}))
    now, then = torch.tensor([0.8, 0.8, 0.05]).log(), torch.tensor([0.2, 0.1, 0.2]).log()
    tokens = tokens_of(leaf(*now.tolist()), behaviour_logprobs=then.tolist(), advantages=1.0)
    _, gradient, _ = worked_out(objective, tokens)
    assert gradient == pytest.approx([-4.0, 0.0, 0.0], rel=1e-5)  # ratios 4, 8 and 1/4


def test_what_is_set_otherwise_than_in_the_papers_is_said_with_the_remedy(capsys):
    learner = LearnerConfig(
        rejection={"type": "token_range"},
        correction={"type": "token_tis", "truncation_cap": 2.0},
        aggregation={"type": "token_mean"},
    )
    aggregation, weight = learner.differences_from_papers
    assert aggregation == (
        "The aggregation is token_mean, and that of IcePop (arXiv:2510.18855) is sequence_mean: leave out "
        "learner.aggregation if IcePop (arXiv:2510.18855) is what you mean."
    )
    assert "is token_tis (truncation_cap=2.0, bound=truncate), and IcePop (arXiv:2510.18855)" in weight
    say_objective(learner)
    said = capsys.readouterr().out
    assert said.count("objective_differs_from_paper") == 2
    assert "token_range" in said
    none = LearnerConfig(rejection={"type": "second_moment"}, correction={"type": "none"})
    assert "The correction is none, and M2PO" in none.differences_from_papers[0]


def test_a_start_says_what_differs_from_a_paper(tmp_path):
    def remarks(**learner: object) -> list[str]:
        return start_remarks(resolve({"directory": tmp_path, "learner": learner}))

    assert remarks(loss={"type": "gspo"}) == []
    assert "that of GSPO" in remarks(loss={"type": "gspo"}, aggregation={"type": "token_mean"})[0]


# --- what a loss states ---


@pytest.mark.parametrize("kind", [kind for kind in get_args(UsedLoss) if kind is not PluginLoss])
def test_every_built_in_loss_states_what_others_go_by(kind):
    assert "stated" in vars(kind)
    assert isinstance(kind.stated, LossFacts)


class Toy(Loss):
    """A new loss of which nobody has stated anything."""

    type: Literal["toy"] = "toy"


class OwnRatio(Toy):
    stated: ClassVar[LossFacts] = LossFacts(own_ratio=True, by_sequence=False)


def test_a_loss_that_states_nothing_is_corrected_and_sees_whole_sequences():
    toy, own = (LearnerConfig().model_copy(update={"loss": loss}) for loss in (Toy(), OwnRatio()))
    assert (toy.used_correction, own.used_correction) == (TokenTIS(), NoCorrection())
    assert toy.used_aggregation == TokenMean()
    assert not Objective(Toy(), TokenTIS()).is_separable
    assert Objective(OwnRatio()).is_separable


@pytest.mark.parametrize(("sampled_by", "correction"), [("current", "token_tis"), ("behaviour", "none")])
def test_a_loss_of_the_users_own_is_corrected_as_it_says(sampled_by, correction):
    loss = {"type": "plugin", "function": "my_loss:mine"}
    assert LearnerConfig(loss=loss).used_correction.type == "token_tis"
    learner = LearnerConfig(loss={**loss, "sampled_by": sampled_by, "separable": False})
    assert learner.used_correction.type == correction
    assert not Objective.of(learner).is_separable
