"""The configured objective, which gives the loss of each token."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from learner.algorithms.corrections.sequence_tis import sequence_tis
from learner.algorithms.corrections.token_tis import token_tis
from learner.algorithms.losses.cispo import cispo_loss
from learner.algorithms.losses.gspo import gspo_loss
from learner.algorithms.losses.kl import kl_estimates
from learner.algorithms.losses.ppo_clip import ppo_clip_loss
from learner.algorithms.losses.reinforce import reinforce_loss
from learner.algorithms.losses.sapo import sapo_loss
from learner.algorithms.losses.sft import sft_loss
from learner.algorithms.losses.topr import topr_loss
from learner.algorithms.plugin import chosen_function
from learner.algorithms.rejections.by_sequence import negative_divergence, sequence_range, veto
from learner.algorithms.rejections.by_token import binary_kl, binary_tv, token_range
from learner.algorithms.tokens import LossTokens
from learner.algorithms.whole_sequences import over_whole_sequences
from learner.config.correction import NoCorrection, NoRejection, RejectionConfig, TokenTIS, UsedCorrection
from learner.config.frozen_policies import NO_REFERENCE, NO_TEACHER, ReferenceConfig, TeacherConfig
from learner.config.learner import LearnerConfig
from learner.config.loss import PluginLoss, PPOClipLoss, SFTLoss, UsedLoss

DISTANCES = ("reference_k1", "reference_k3", "teacher_k1", "proximal_k1")
"""Sums that `token_losses` has for an objective that wants these policies: estimates of KL(current || other),
but KL(proximal || current)."""
Sums = dict[str, Tensor]
LOSSES: dict[str, Callable[..., tuple[Tensor, Sums]]] = {
    "cispo": cispo_loss,
    "gspo": gspo_loss,
    "ppo_clip": ppo_clip_loss,
    "reinforce": reinforce_loss,
    "sapo": sapo_loss,
    "sft": sft_loss,
    "topr": topr_loss,
}
"""Losses by the `type` of the configuration. Each takes tokens and its settings, and returns the losses of
the tokens [N] and sums to log."""
CORRECTIONS: dict[str, Callable[..., tuple[Tensor, Tensor, Sums]]] = {
    "sequence_tis": sequence_tis,
    "token_tis": token_tis,
}
"""Corrections by the `type` of the configuration. Each takes log ratios [N], the sequence of each token [N]
and its settings, and returns weights [N], which tokens are kept [N], and sums to log."""
REJECTIONS_BY_TOKEN: dict[str, Callable[..., Tensor]] = {
    "binary_kl": binary_kl,
    "binary_tv": binary_tv,
    "token_range": token_range,
}
REJECTIONS: dict[str, Callable[..., Tensor]] = REJECTIONS_BY_TOKEN | {
    "negative_divergence": negative_divergence,
    "sequence_range": sequence_range,
    "veto": veto,
}
"""Rejections by the `type` of the configuration. Each takes log ratios, log-probs, advantages and the
sequence of each token, [N] each, and its settings, and returns which tokens are kept [N]."""
LOSSES_BY_SEQUENCE = ("gspo", "topr")
NO_CORRECTION = NoCorrection()
NO_REJECTION = NoRejection()


@dataclass(frozen=True)
class Objective:
    """A loss with its correction, and the frozen policies that the trained one is drawn to."""

    loss: UsedLoss | SFTLoss
    correction: UsedCorrection = NO_CORRECTION
    entropy_coef: float = 0.0
    reference: ReferenceConfig = NO_REFERENCE
    teacher: TeacherConfig = NO_TEACHER
    rejection: RejectionConfig = NO_REJECTION

    @classmethod
    def of(cls, learner: LearnerConfig) -> Self:
        """Return the objective of reinforcement learning."""
        return cls(
            learner.loss,
            learner.used_correction,
            learner.entropy_coef,
            learner.reference,
            learner.teacher,
            learner.rejection,
        )

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies besides the current one whose log-probs it wants: "proximal" and tags of frozen ones."""
        return ("proximal",) * self.is_decoupled + self.frozen

    @property
    def frozen(self) -> tuple[str, ...]:
        """Tags of the frozen policies that it wants."""
        wanted = {"reference": self.reference.kl_coef > 0, "teacher": self.teacher.path is not None}
        return tuple(tag for tag in wanted if wanted[tag])

    @property
    def is_decoupled(self) -> bool:
        """Tell whether the clip is centred on the policy before the step."""
        return isinstance(self.loss, PPOClipLoss) and self.loss.centre == "proximal"

    @property
    def is_separable(self) -> bool:
        """Tell whether the loss of each token depends on that token alone."""
        if self.correction.type not in ("none", "token_tis"):  # a plugin may look at whole sequences
            return False
        if self.rejection.type not in ("none", *REJECTIONS_BY_TOKEN):
            return False
        loss = self.loss
        return loss.separable if isinstance(loss, PluginLoss) else loss.type not in LOSSES_BY_SEQUENCE

    @cached_property
    def loss_function(self) -> Callable[[LossTokens], tuple[Tensor, Sums]]:
        """Return the loss with its settings; looked up once, since every chunk of every micro-batch calls
        it."""
        return chosen_function("loss", self.loss, LOSSES)

    @cached_property
    def correction_function(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Sums]]:
        """Return the correction with its settings, which is not "none"; looked up once."""
        return chosen_function("correction", self.correction, CORRECTIONS)

    @cached_property
    def rejection_function(self) -> Callable[..., Tensor]:
        """Return the rejection with its settings, which is not "none"; looked up once."""
        function: Callable[..., Tensor] = chosen_function("rejection", self.rejection, REJECTIONS)
        return function

    @property
    def truncation_cap(self) -> float:
        """Importance weight from which on a token counts as truncated; infinite for most corrections."""
        return self.correction.truncation_cap if isinstance(self.correction, TokenTIS) else torch.inf


def token_losses(objective: Objective, tokens: LossTokens) -> tuple[Tensor, Sums]:
    """Compute the loss that `objective` names of each token, weighed as its aggregation wants it.

    Returns the losses [N], with gradient, whose sum over all micro-batches and ranks is to be divided by the
    sum of all denominators (learner/algorithms/aggregation.py); and detached sums to log.
    """
    penalised, sums = _penalised(objective, tokens)
    losses, found = objective.loss_function(penalised)
    sums |= found
    log_ratio = _log_ratio(objective, tokens)
    weights, kept, found = _correction(objective, tokens, log_ratio)
    sums |= found
    if not isinstance(objective.rejection, NoRejection):
        kept = kept & _not_rejected(objective, penalised, log_ratio)
        sums["rejected_tokens"] = (~kept).sum()
    losses = losses * torch.where(kept, weights, 0.0)
    if objective.reference.kl_coef > 0 and objective.reference.kl_in == "loss":
        losses = losses + objective.reference.kl_coef * _reference_kl(objective, tokens)
    if objective.entropy_coef > 0:
        losses = losses - objective.entropy_coef * tokens.entropy
    losses = torch.where(kept, losses, 0.0) * tokens.streams["loss_weights"]
    return losses, {name: values.detach() for name, values in sums.items()}


def _log_ratio(objective: Objective, tokens: LossTokens) -> Tensor:
    """Return how much likelier each token is under the policy that the loss takes it to come from than under
    the one that sampled it, [N] nats, without gradient."""
    return _assumed(objective, tokens) - tokens.streams["behaviour_logprobs"]


def _assumed(objective: Objective, tokens: LossTokens) -> Tensor:
    return tokens.streams["proximal_logprobs"] if objective.is_decoupled else tokens.logprobs.detach()


def _correction(objective: Objective, tokens: LossTokens, log_ratio: Tensor) -> tuple[Tensor, Tensor, Sums]:
    """Weigh tokens by the policy that the loss takes them to come from over the one that sampled them."""
    correction = objective.correction
    if isinstance(correction, NoCorrection):
        return torch.ones_like(tokens.logprobs), torch.ones_like(tokens.sequence, dtype=torch.bool), {}
    if isinstance(correction, TokenTIS):
        return objective.correction_function(log_ratio, tokens.sequence)
    weights, kept, sums = over_whole_sequences(objective.correction_function, tokens, log_ratio)
    return weights, kept, sums | {"rejected_tokens": (~kept).sum()}


def _not_rejected(objective: Objective, tokens: LossTokens, log_ratio: Tensor) -> Tensor:
    """Return which tokens the rejection keeps, bool [N]."""
    values = log_ratio, _assumed(objective, tokens), tokens.streams["advantages"]
    if objective.rejection.type in REJECTIONS_BY_TOKEN:
        return objective.rejection_function(*values, tokens.sequence)

    def judged(*arguments: Tensor) -> tuple[Tensor, Tensor, Sums]:
        kept = objective.rejection_function(*arguments)
        return kept, kept, {}

    return over_whole_sequences(judged, tokens, *values)[1]


def _reference_kl(objective: Objective, tokens: LossTokens) -> Tensor:
    reference = objective.reference
    return kl_estimates(
        tokens.logprobs,
        tokens.streams["reference_logprobs"],
        estimator=reference.kl_estimator,
        importance_ratio=tokens.ratio_to("behaviour_logprobs") if reference.kl_unbiased else None,
    )


def _penalised(objective: Objective, tokens: LossTokens) -> tuple[LossTokens, Sums]:
    """Take from the advantages what the policy is penalised for; sum up its distance to other policies."""
    advantages, streams, sums = tokens.streams["advantages"], tokens.streams, {}
    logprobs = tokens.logprobs.detach()
    old = streams["proximal_logprobs"] if objective.is_decoupled else logprobs
    reference, teacher = objective.reference, objective.teacher
    if reference.kl_coef > 0:
        if reference.kl_in == "advantage":
            kl = kl_estimates(old, streams["reference_logprobs"], estimator=reference.kl_estimator)
            advantages = advantages - reference.kl_coef * kl
        for estimator in ("k1", "k3"):
            kl = kl_estimates(logprobs, streams["reference_logprobs"], estimator=estimator)
            sums[f"reference_{estimator}"] = kl.sum()
    if teacher.path is not None:
        kl = kl_estimates(old, streams["teacher_logprobs"], estimator="k1")
        advantages = advantages - teacher.coef * kl
        sums["teacher_k1"] = kl.sum()
    if objective.is_decoupled:
        sums["proximal_k1"] = (old - logprobs).sum()
    return tokens.with_streams(advantages=advantages), sums
