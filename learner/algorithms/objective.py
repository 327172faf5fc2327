"""From the configuration of an objective to the loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from learner.algorithms.losses.kl import kl_estimates
from learner.algorithms.losses.ppo_clip import ppo_clip_loss
from learner.algorithms.losses.sft import sft_loss
from learner.algorithms.losses.tis import tis_loss
from learner.config.algorithm import PPOClipLoss, SFTLoss, TISLoss
from learner.config.frozen_policies import NO_REFERENCE, NO_TEACHER, ReferenceConfig, TeacherConfig
from learner.config.learner import LearnerConfig
from learner.data.packing import MicroBatch, TrainedTokens

DISTANCES = ("reference_k1", "reference_k3", "teacher_k1", "proximal_k1")
"""Sums that `compute_loss` has for an objective that wants these policies: estimates of KL(current || other),
but KL(proximal || current)."""
Loss = tuple[Tensor, dict[str, Tensor]]
Tokens = MicroBatch | TrainedTokens


@dataclass(frozen=True)
class Objective:
    """A loss, and the frozen policies that the trained one is drawn to."""

    loss: TISLoss | PPOClipLoss | SFTLoss
    reference: ReferenceConfig = NO_REFERENCE
    teacher: TeacherConfig = NO_TEACHER

    @classmethod
    def of(cls, learner: LearnerConfig) -> Self:
        """That of reinforcement learning."""
        return cls(learner.loss, learner.reference, learner.teacher)

    @property
    def policies(self) -> tuple[str, ...]:
        """Those besides the current one whose log-probs it wants: "proximal" and tags of frozen ones."""
        return ("proximal",) * self.is_decoupled + self.frozen

    @property
    def frozen(self) -> tuple[str, ...]:
        """Tags of the frozen policies that it wants."""
        wanted = {"reference": self.reference.kl_coef > 0, "teacher": self.teacher.path is not None}
        return tuple(tag for tag in wanted if wanted[tag])

    @property
    def is_decoupled(self) -> bool:
        """Whether the clip is centred on the policy before the step."""
        return isinstance(self.loss, PPOClipLoss) and self.loss.centre == "proximal"


def _tis(config: TISLoss, logprobs: Tensor, batch: Tokens) -> Loss:
    return tis_loss(
        logprobs,
        batch.behaviour_logprobs,
        batch.advantages,
        batch.loss_mask,
        truncation_cap=config.truncation_cap,
    )


def _ppo_clip(config: PPOClipLoss, logprobs: Tensor, batch: Tokens) -> Loss:
    return ppo_clip_loss(
        logprobs,
        batch.behaviour_logprobs,
        batch.advantages,
        batch.loss_mask,
        clip_eps=config.clip_eps,
        clip_eps_high=config.clip_eps if config.clip_eps_high is None else config.clip_eps_high,
        truncation_cap=config.truncation_cap,
        proximal_logprobs=batch.proximal_logprobs if config.centre == "proximal" else None,
    )


def _sft(config: SFTLoss, logprobs: Tensor, batch: Tokens) -> Loss:
    return sft_loss(logprobs, batch.loss_mask)


LOSSES: dict[str, Callable[[Any, Tensor, Tokens], Loss]] = {
    "ppo_clip": _ppo_clip,
    "sft": _sft,
    "tis": _tis,
}
"""By the `type` of the configuration: (config, log-probabilities [T], batch) to (sum, sums to log)."""


def compute_loss(objective: Objective, logprobs: Tensor, batch: Tokens) -> Loss:
    """Compute what `objective` names: its sum over the mask, and detached sums to log."""
    advantages, distances = _drawn_advantages(objective, logprobs.detach(), batch)
    loss, sums = LOSSES[objective.loss.type](objective.loss, logprobs, replace(batch, advantages=advantages))
    reference = objective.reference
    if reference.kl_coef > 0 and reference.kl_in == "loss":
        ratio = (logprobs - _sampling_logprobs(objective, batch)).exp() if reference.kl_unbiased else None
        kl = kl_estimates(
            logprobs,
            batch.reference_logprobs,
            batch.loss_mask,
            estimator=reference.kl_estimator,
            importance_ratio=ratio,
        )
        loss = loss + reference.kl_coef * kl.sum()
    return loss, sums | distances


def _drawn_advantages(
    objective: Objective, logprobs: Tensor, batch: Tokens
) -> tuple[Tensor, dict[str, Tensor]]:
    """Advantages less what the policy is penalised for at each token, and sums of its distance to others."""
    advantages, sums, mask = batch.advantages, {}, batch.loss_mask
    old = batch.proximal_logprobs if objective.is_decoupled else logprobs
    reference, teacher = objective.reference, objective.teacher
    if reference.kl_coef > 0:
        if reference.kl_in == "advantage":
            kl = kl_estimates(old, batch.reference_logprobs, mask, estimator=reference.kl_estimator)
            advantages = advantages - reference.kl_coef * kl
        for estimator in ("k1", "k3"):
            kl = kl_estimates(logprobs, batch.reference_logprobs, mask, estimator=estimator)
            sums[f"reference_{estimator}"] = kl.sum()
    if teacher.path is not None:
        kl = kl_estimates(old, batch.teacher_logprobs, mask, estimator="k1")
        advantages = advantages - teacher.coef * kl
        sums["teacher_k1"] = kl.sum()
    if objective.is_decoupled:
        sums["proximal_k1"] = torch.where(mask, old - logprobs, 0.0).sum()
    return advantages, sums


def _sampling_logprobs(objective: Objective, batch: Tokens) -> Tensor:
    return batch.proximal_logprobs if objective.is_decoupled else batch.behaviour_logprobs
