"""The configured objective, which gives the loss of each token."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from learner.algorithms.diagnostics import REJECTED_BY
from learner.algorithms.losses.kl import DIRECTIONS, kl_estimates, top_k_kl
from learner.algorithms.plugin import chosen_function
from learner.algorithms.tokens import LossTokens, over_whole_sequences
from learner.config.algorithm import NO_ENTROPY_TARGET, EntropyTargetConfig
from learner.config.correction import Correction, NoCorrection, Rejection
from learner.config.frozen_policies import NO_REFERENCE, ReferenceConfig
from learner.config.learner import LearnerConfig
from learner.config.loss import Loss, ProximalSource

DISTANCES = ("reference_k1", "reference_k3", "teacher_k1", "teacher_kl", "proximal_k1")
"""Sums that `token_losses` has for an objective that wants these policies: estimates of KL(current || other),
but KL(proximal || current); `teacher_kl` is computed over the teacher's likeliest tokens, in the direction
that is configured."""
LoggedSums = dict[str, Tensor]
NO_CORRECTION = NoCorrection()


@dataclass(frozen=True)
class Objective:
    """A loss with its correction, and the frozen policies that the trained one is drawn to."""

    loss: Loss
    correction: Correction = NO_CORRECTION
    entropy_coef: float = 0.0
    reference: ReferenceConfig = NO_REFERENCE
    teachers: tuple[str, ...] = ()
    """Tags of the teachers of sampled tokens; their weights for each are in the stream `teacher_coefs`."""
    rejections: tuple[Rejection, ...] = ()
    """Each leaves tokens out; trained is what all of them keep."""
    entropy_target: EntropyTargetConfig = NO_ENTROPY_TARGET
    """Entropy to which a backend adapts `entropy_coef` between updates."""
    values_by_vtrace: bool = False
    """A critic learns the value of the policy before the step, whose log-probs it therefore wants."""
    top_k_teachers: tuple[str, ...] = ()
    """Tags of the teachers of whole distributions; their weights for each token are in the streams
    `reverse_kl_coefs` and `forward_kl_coefs`."""
    replays_routing: bool = False
    """Samples name the experts of their tokens, on some ranks at least."""

    @classmethod
    def of(cls, learner: LearnerConfig) -> Self:
        return cls(
            learner.used_loss,
            learner.used_correction,
            learner.entropy_coef,
            learner.reference,
            tuple(tag for tag, teacher in learner.used_teachers.items() if teacher.kl == "sampled"),
            learner.used_rejections,
            learner.entropy_target,
            learner.has_critic and learner.critic.targets == "vtrace",
            tuple(tag for tag, teacher in learner.used_teachers.items() if teacher.kl == "top_k"),
            learner.router_replay != "none",
        )

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies besides the current one and the teachers whose log-probs it wants."""
        before_the_step = self.proximal == "recomputed" or bool(self.selected) or self.values_by_vtrace
        return ("proximal",) * before_the_step + ("reference",) * (self.reference.kl_coef > 0)

    @property
    def frozen(self) -> tuple[str, ...]:
        return ("reference",) * (self.reference.kl_coef > 0) + self.teachers + self.top_k_teachers

    @property
    def is_decoupled(self) -> bool:
        """Tell whether the clip is centred on the policy before the step."""
        return self.loss.facts.proximal is not None

    @property
    def proximal(self) -> ProximalSource | None:
        """Say where the log-probs at the centre of a decoupled clip come from; `None` without one.

        `LearnerConfig.used_loss` has resolved "auto", which here is a pass of its own."""
        source = self.loss.facts.proximal
        return "recomputed" if source == "auto" else source

    @property
    def selected(self) -> tuple[str, ...]:
        """Streams of tokens that are picked over the whole update."""
        picks = (self.loss.facts.picks, *(rejection.picks for rejection in self.rejections))
        return tuple(one.stream for one in picks if one is not None)

    @property
    def is_separable(self) -> bool:
        """Tell whether the loss of each token depends on that token's log-prob and entropy alone."""
        if self.top_k_teachers:  # the loss depends on log-probs of other tokens in its place
            return False
        if not all(rejection.by_token for rejection in self.rejections):
            return False
        return not (self.correction.by_sequence or self.loss.facts.by_sequence)

    @cached_property
    def loss_function(self) -> Callable[[LossTokens], tuple[Tensor, LoggedSums]]:
        """Return the loss with its settings; looked up once, since every chunk of every micro-batch calls
        it."""
        return chosen_function("loss", self.loss)

    @cached_property
    def correction_function(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, LoggedSums]]:
        """Return the correction with its settings; looked up once."""
        return chosen_function("correction", self.correction)

    @cached_property
    def rejection_functions(self) -> dict[Rejection, Callable[..., Tensor]]:
        """Return the rejections that judge each token here, with their settings; looked up once."""
        computed = [rejection for rejection in self.rejections if rejection.picks is None]
        return {rejection: chosen_function("rejection", rejection) for rejection in computed}


def token_losses(objective: Objective, tokens: LossTokens) -> tuple[Tensor, LoggedSums]:
    """Compute the loss that `objective` names of each token, with all its terms, times what its aggregation
    weighs the token by and the importance weight of its group.

    Returns the losses [N], with gradient, whose sum over all micro-batches and ranks is to be divided by the
    sum of all denominators (learner/algorithms/aggregation.py); and detached sums to log, as `summed` makes
    them."""
    losses, found = losses_and_counts(objective, tokens)
    return losses, summed(found, tokens.streams["advantages"])


def losses_and_counts(objective: Objective, tokens: LossTokens) -> tuple[Tensor, LoggedSums]:
    """Return the losses of `token_losses`, and its sums before they are summed: what is counted by token is
    [N]."""
    tokens = _with_proximal(objective, tokens)
    penalised, sums = _penalised(objective, tokens)
    losses, found = objective.loss_function(penalised)
    sums |= found
    # How much likelier each token is under the policy that the loss takes it to come from.
    log_ratio = _assumed(objective, tokens) - tokens.streams["behaviour_logprobs"]
    weights, kept, found = _correction(objective, tokens, log_ratio)
    sums |= found
    rejected = {"correction": ~kept} if objective.correction.may_reject else {}
    for rejection in objective.rejections:
        kept_by = _kept_by(rejection, objective, penalised, log_ratio)
        kept = kept & kept_by
        rejected[rejection.type] = ~kept_by | rejected.get(rejection.type, False)
    if rejected:
        sums["rejected_tokens"] = ~kept
        sums |= {f"{REJECTED_BY}{who}_tokens": by_it for who, by_it in rejected.items()}
    losses = losses * torch.where(kept, weights, 0.0)
    if objective.reference.kl_coef > 0 and objective.reference.kl_in == "loss":
        losses = losses + objective.reference.kl_coef * _reference_kl(objective, tokens)
    if objective.top_k_teachers:
        divergence, found = _teacher_kl(tokens)
        losses, sums = losses + divergence, sums | found
    if objective.entropy_coef > 0:
        losses = losses - objective.entropy_coef * tokens.entropy
    losses = torch.where(kept, losses, 0.0)
    losses = losses * tokens.streams["loss_weights"] * tokens.streams["group_weights"]
    for name in objective.selected:  # NaN where nothing was picked from: such a step must not train
        losses = losses + 0.0 * tokens.streams[name]
    return losses, sums


def summed(found: LoggedSums, advantages: Tensor) -> LoggedSums:
    """Add up what is counted by token, in all, and by the sign of its advantage with `_positive` and
    `_negative` behind its name."""
    sums = {}
    for name, values in found.items():
        sums[name] = values.detach().sum()
        if values.ndim:
            for sign, of_sign in (("positive", advantages > 0), ("negative", advantages < 0)):
                sums[f"{name}_{sign}"] = torch.where(of_sign, values.detach(), 0).sum()
    return sums


def _with_proximal(objective: Objective, tokens: LossTokens) -> LossTokens:
    """Return the tokens with the log-probs at the centre of a decoupled clip, if no pass has brought them."""
    if objective.proximal not in ("first_pass", "interpolated"):
        return tokens
    now, then = tokens.logprobs.detach(), tokens.streams["behaviour_logprobs"]
    if objective.proximal == "interpolated":  # arXiv:2512.06547
        staleness = (tokens.policy_version - tokens.streams["policy_versions"]).clamp(min=0)
        now = torch.where(staleness > 0, torch.lerp(now, then, 1 / staleness.clamp(min=1)), now)
    return tokens.with_streams(proximal_logprobs=now)


def _assumed(objective: Objective, tokens: LossTokens) -> Tensor:
    return tokens.streams["proximal_logprobs"] if objective.is_decoupled else tokens.logprobs.detach()


def _correction(
    objective: Objective, tokens: LossTokens, log_ratio: Tensor
) -> tuple[Tensor, Tensor, LoggedSums]:
    if objective.correction.by_sequence:
        return over_whole_sequences(objective.correction_function, tokens, log_ratio)
    return objective.correction_function(log_ratio, tokens.sequence)


def _kept_by(rejection: Rejection, objective: Objective, tokens: LossTokens, log_ratio: Tensor) -> Tensor:
    """Return which tokens a rejection keeps, bool [N]."""
    if rejection.picks is not None:
        return tokens.streams[rejection.picks.stream] == 0
    function = objective.rejection_functions[rejection]
    values = log_ratio, _assumed(objective, tokens), tokens.streams["advantages"]
    if rejection.by_token:
        return function(*values, tokens.sequence)

    def judged(*arguments: Tensor) -> tuple[Tensor, Tensor, LoggedSums]:
        kept = function(*arguments)
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


def _teacher_kl(tokens: LossTokens) -> tuple[Tensor, LoggedSums]:
    """Return each token's weighed divergence from its teacher over the teacher's likeliest tokens, [N]."""
    total = divergence = torch.zeros_like(tokens.logprobs)
    if tokens.top_logprobs is not None and tokens.teacher_top_logprobs is not None:
        for direction in DIRECTIONS:
            coefs = tokens.streams[f"{direction}_kl_coefs"]
            kl = top_k_kl(tokens.top_logprobs, tokens.teacher_top_logprobs, direction=direction)
            total = total + coefs * kl
            divergence = divergence + torch.where(coefs > 0, kl.detach(), 0.0)
    return total, {"teacher_kl": divergence.sum()}


def _penalised(objective: Objective, tokens: LossTokens) -> tuple[LossTokens, LoggedSums]:
    advantages, streams, sums = tokens.streams["advantages"], tokens.streams, {}
    logprobs = tokens.logprobs.detach()
    old = streams["proximal_logprobs"] if objective.is_decoupled else logprobs
    reference = objective.reference
    if reference.kl_coef > 0:
        if reference.kl_in == "advantage":
            kl = kl_estimates(old, streams["reference_logprobs"], estimator=reference.kl_estimator)
            advantages = advantages - reference.kl_coef * kl
        for estimator in ("k1", "k3"):
            kl = kl_estimates(logprobs, streams["reference_logprobs"], estimator=estimator)
            sums[f"reference_{estimator}"] = kl.sum()
    if objective.teachers:
        taught = streams["teacher_coefs"] > 0
        kl = torch.where(taught, kl_estimates(old, streams["teacher_logprobs"], estimator="k1"), 0.0)
        advantages = advantages - streams["teacher_coefs"] * kl
        sums["teacher_k1"] = kl.sum()
    if objective.is_decoupled:
        sums["proximal_k1"] = (old - logprobs).sum()
    return tokens.with_streams(advantages=advantages), sums
