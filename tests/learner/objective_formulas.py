"""What objectives are by their papers' formulas, in plain torch: the loss of each token of a sample."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from learner.config.correction import (
    BinaryKL,
    BinaryKLTwoWay,
    BinaryTV,
    NegativeDivergence,
    SecondMoment,
    SequenceRange,
    SequenceTIS,
    TokenRange,
    Veto,
)
from learner.config.frozen_policies import TeacherConfig
from learner.config.learner import LearnerConfig
from learner.config.loss import ClipCovLoss, KLCovLoss, PPOClipLoss
from learner.config.plugin import Plugin
from learner.data.packing import Sample
from tests.learner.tiny import VOCAB, reference_logits

TEMPERATURE = 0.8


POLICY_VERSION = 3


def sample_logprobs(model, samples: list[Sample]) -> list[Tensor]:
    """Log-probs, entropies and all log-probs [2 + VOCAB, L - 1] of all tokens but the first."""
    found, start, logits = [], 0, reference_logits(model, samples)
    for sample in samples:
        end = start + len(sample.token_ids)
        distribution = torch.log_softmax(logits[start : end - 1] / TEMPERATURE, dim=-1)
        labels = torch.from_numpy(sample.token_ids[1:]).long()[:, None]
        logprobs = distribution.gather(-1, labels)[:, 0]
        if sample.kept is not None:
            sets = np.split(sample.kept.token_ids, np.cumsum(sample.kept.counts)[:-1])[1:]
            lost = [row[ids].logsumexp(0) if len(ids) else row.new_zeros(())
                    for row, ids in zip(distribution, sets, strict=True)]  # fmt: skip
            logprobs = logprobs - torch.stack(lost)
        entropy = -(distribution.exp() * distribution).sum(-1)
        found.append(torch.cat((torch.stack((logprobs, entropy)), distribution.t())))
        start = end
    return found


def estimated(kind: str, r: Tensor) -> Tensor:
    return {"k1": r, "k2": r**2 / 2, "k3": torch.exp(-r) - 1 + r, "low_var_kl": torch.exp(-r) - 1 + r}[kind]


def weighed(
    learner: LearnerConfig, sample: Sample, now: Tensor, behaviour: Tensor, advantage: Tensor
) -> Tensor:
    """Policy gradient under the learner's correction."""
    log_ratio, correction = now.detach() - behaviour, learner.used_correction
    if isinstance(correction, Plugin):
        mask = torch.from_numpy(sample.loss_mask[1:])
        logs = torch.where(mask, log_ratio.clamp(max=0), 0.0)
        trace = torch.tensor(list(accumulate(logs.tolist()))).exp()
        weight = torch.where(trace >= correction.settings["least"], trace, 0.0)
    elif isinstance(correction, SequenceTIS):
        weight = of_sequence(log_ratio, sample, correction.over).clamp(max=correction.sequence_cap)
    else:
        weight = log_ratio.exp().clamp(max=correction.truncation_cap)
    if getattr(correction, "bound", "truncate") == "clip":
        weight = weight.clamp(min=correction.floor or 1 / correction.sequence_cap)
    if getattr(correction, "bound", "truncate") == "mask":
        ratio = log_ratio.exp()
        weight = torch.where((ratio * correction.truncation_cap >= 1) & (ratio == weight), weight, 0.0)
    return -weight * advantage * now


def clipped_by_sequence(learner, sample, now, behaviour, advantage) -> Tensor:
    loss, mask = learner.loss, torch.from_numpy(sample.loss_mask[1:])
    ratio = (now - behaviour)[mask].mean().exp() if mask.any() else torch.ones(())
    clipped = ratio.clamp(1 - loss.sequence_clip_eps, 1 + loss.sequence_clip_eps_high)
    return -torch.minimum(ratio * advantage, clipped * advantage).expand(len(now))


def clipped_by_token(learner, sample, now, centre, advantage) -> Tensor:
    loss, ratio = learner.loss, torch.exp(now - centre)
    clipped = ratio.clamp(1 - loss.clip_eps, 1 + loss.clip_eps)
    weight = torch.exp(centre - torch.from_numpy(sample.streams["behaviour_logprobs"][1:]))
    weight = weight.clamp(max=getattr(learner.used_correction, "truncation_cap", 1.0))
    gained = torch.minimum(ratio * advantage, clipped * advantage)
    if loss.dual_clip is not None and advantage < 0:
        gained = torch.maximum(gained, loss.dual_clip * advantage)
    return -weight * gained


def weight_clipped(learner, sample, now, behaviour, advantage) -> Tensor:
    ratio = torch.exp(now.detach() - behaviour)
    return -ratio.clamp(learner.loss.lowest_weight, learner.loss.highest_weight) * advantage * now


def softly_gated(learner, sample, now, behaviour, advantage) -> Tensor:
    t = learner.loss.temperature if advantage > 0 else learner.loss.temperature_negative
    return -(4 / t) * torch.sigmoid(t * (torch.exp(now - behaviour) - 1)) * advantage


def tapered(learner, sample, now, behaviour, advantage) -> Tensor:
    ratio = of_sequence(now - behaviour, sample, "product").clamp(max=1)
    return -(1.0 if advantage > 0 else ratio) * advantage * now


def capped(learner, sample, now, behaviour, advantage) -> Tensor:
    return -torch.exp(now.detach() - behaviour).clamp(max=learner.loss.ratio_cap) * advantage * now


def cut_by_token(learner, sample, now, behaviour, advantage) -> Tensor:
    mask, loss = torch.from_numpy(sample.loss_mask[1:]), learner.loss
    if not mask.any():
        return torch.zeros_like(now)
    ratio = torch.exp(now - behaviour)
    low, high = torch.tensor(-loss.log_clip).exp(), torch.tensor(loss.log_clip_high).exp()
    kept = torch.minimum(ratio, high) if advantage > 0 else torch.maximum(ratio, low)
    return (-(kept[mask].prod() ** (1 / mask.sum())) * advantage).expand(len(now))


def kernel(learner, sample, now, behaviour, advantage) -> Tensor:
    loss, whole = learner.loss, of_sequence(now - behaviour, sample, "product")
    power, decay = (loss.power, loss.decay) if advantage >= 0 else (loss.power_negative, loss.decay_negative)
    return -(whole**power) * torch.exp(decay * (1 - whole)) * advantage * now


def squared(learner, sample, now, behaviour, advantage) -> Tensor:
    """The loss of the whole sequence, spread over its trained tokens, without what is constant."""
    mask, t = torch.from_numpy(sample.loss_mask[1:]), learner.loss.kl_weight
    whole = (now - behaviour)[mask].sum()
    loss = ((advantage - t * whole) ** 2 - advantage**2) / (2 * t)
    return (loss / max(1, int(mask.sum()))).expand(len(now))


def clipped_but_for_picked(learner, sample, now, behaviour, advantage) -> Tensor:
    ratio = torch.exp(now - behaviour)
    clipped = ratio.clamp(1 - learner.loss.clip_eps, 1 + learner.loss.clip_eps)
    return torch.where(sample.picked, 0.0, -torch.minimum(ratio * advantage, clipped * advantage))


def held_if_picked(learner, sample, now, behaviour, advantage) -> Tensor:
    return -torch.exp(now - behaviour) * advantage + sample.picked * torch.abs(now - behaviour)


FORMULAS = {
    "reinforce": weighed,
    "gspo": clipped_by_sequence,
    "ppo_clip": clipped_by_token,
    "cispo": weight_clipped,
    "sapo": softly_gated,
    "topr": tapered,
    "aipo": capped,
    "gmpo": cut_by_token,
    "vespo": kernel,
    "regression": squared,
    "clip_cov": clipped_but_for_picked,
    "kl_cov": held_if_picked,
}
"""Losses by their formulas: of the log-probs now and at the centre, and the sample's advantage."""


def token_losses(learner: LearnerConfig, sample: Sample, found: Tensor, old: Tensor, others) -> Tensor:
    """Return the losses by their formulas; that of the decoupled clip is in arXiv:2505.24298."""
    now, entropy, whole = found[0], found[1], found[2:].t()
    others, wholes = {tag: each[0] for tag, each in others.items()}, others
    behaviour = torch.from_numpy(sample.streams["behaviour_logprobs"][1:])
    kl, loss, advantage = learner.reference, learner.loss, torch.tensor(sample.streams["advantages"])
    decoupled = isinstance(loss, PPOClipLoss) and loss.centre == "proximal"
    if decoupled and learner.used_loss.proximal == "first_pass":
        old = now.detach()
    if decoupled and loss.proximal == "interpolated":  # staleness is 0 or 2
        stale = torch.from_numpy(sample.streams["policy_versions"][1:]) < POLICY_VERSION
        old = torch.where(stale, (now.detach() + behaviour) / 2, now.detach())
    before = old if decoupled else now.detach()
    if kl.kl_coef and kl.kl_in == "advantage":
        advantage = advantage - kl.kl_coef * estimated(kl.kl_estimator, before - others["reference"])
    for tag, teacher in learner.used_teachers.items():
        if teacher.kl == "sampled" and teacher.teaches(sample.source):
            advantage = advantage - teacher.coef * (before - others[tag])
    tokens = FORMULAS[loss.type](learner, sample, now, old if decoupled else behaviour, advantage)
    if kl.kl_coef and kl.kl_in == "loss":
        term = estimated(kl.kl_estimator, now - others["reference"])
        if kl.kl_unbiased:
            term = torch.exp(now - behaviour) * term
        if kl.kl_estimator == "low_var_kl":
            term = term.clamp(-10, 10)
        tokens = tokens + kl.kl_coef * term
    tokens = tokens + distilled(learner, sample, whole, wholes)
    for rejection in filter(lambda one: one.type != "none", rejections_of(learner)):
        tokens = torch.where(kept_by(rejection, sample, before, before - behaviour), tokens, 0.0)
    return tokens - learner.entropy_coef * entropy


def rejections_of(learner: LearnerConfig) -> list:
    return [learner.rejection, *learner.rejections.values()]


def distilled(learner: LearnerConfig, sample: Sample, ours: Tensor, theirs: dict[str, Tensor]) -> Tensor:
    return sum(
        (
            teacher.coef * divergence(teacher, ours, theirs[tag][2:].t())
            for tag, teacher in learner.used_teachers.items()
            if teacher.kl == "top_k" and teacher.teaches(sample.source)
        ),
        start=torch.zeros(len(ours)),
    )


def divergence(teacher: TeacherConfig, ours: Tensor, theirs: Tensor) -> Tensor:
    """KL over the teacher's likeliest tokens and one bucket, of log-probs [L - 1, VOCAB]."""
    chosen = theirs.argsort(descending=True)[:, : teacher.top_k]
    p, q = (
        torch.cat((each.gather(-1, chosen), 1 - each.gather(-1, chosen).sum(-1, keepdim=True)), dim=-1)
        for each in (ours.double().exp(), theirs.double().exp())
    )
    if chosen.shape[1] == VOCAB:  # what is left is rounding
        p, q = p[:, :-1], q[:, :-1]
    a, b = (p, q) if teacher.direction == "reverse" else (q, p)
    return (a * torch.log(a / b)).sum(-1).float()


def of_sequence(log_ratio: Tensor, sample: Sample, over: str) -> Tensor:
    """Return the ratio of a sequence's trained tokens: their product, or its root."""
    trained = log_ratio.detach()[torch.from_numpy(sample.loss_mask[1:])]
    return torch.exp(trained.sum() / (len(trained) or 1) if over == "mean" else trained.sum())


def kept_by(rejection, sample: Sample, logprobs: Tensor, log_ratio: Tensor) -> Tensor:
    """Return which tokens are trained on, by the formulas."""
    ratio, advantage = torch.exp(log_ratio.detach()), torch.tensor(sample.streams["advantages"])
    now = torch.exp(logprobs.detach())
    then = now / ratio
    trained = torch.from_numpy(sample.loss_mask[1:])
    match rejection:
        case TokenRange():
            return (rejection.lowest <= ratio) & (ratio <= rejection.highest)
        case BinaryTV():
            return torch.where(advantage > 0, now - then, then - now) <= rejection.largest_change
        case BinaryKL():
            kl = then * torch.log(then / now) + (1 - then) * torch.log((1 - then) / (1 - now))
            return (kl <= rejection.largest_kl) | (torch.where(advantage > 0, ratio < 1, ratio > 1))
        case BinaryKLTwoWay():
            ways = [
                p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))
                for p, q in ((then, now), (now, then))
            ]
            return torch.maximum(*ways) <= rejection.largest_kl_either_way
        case SecondMoment():
            return ~sample.picked
        case SequenceRange():
            whole = of_sequence(log_ratio, sample, rejection.over)
            return torch.full_like(
                ratio, rejection.lowest_of_sequence <= whole <= rejection.highest_of_sequence
            ).bool()
        case Veto():
            return torch.full_like(ratio, bool((ratio[trained] >= rejection.smallest).all())).bool()
        case NegativeDivergence():
            away = -torch.log(of_sequence(log_ratio, sample, "mean")) > rejection.largest_drop
            return torch.full_like(ratio, not (advantage < 0 and away)).bool()
    raise AssertionError(rejection)


@dataclass(frozen=True, kw_only=True, slots=True)
class PickedSample(Sample):
    """A sample, and which of its predictions the update picks."""

    picked: Tensor


def picked_by_formula(
    learner, samples: list[Sample], old: list[Tensor], update: list[int]
) -> dict[int, Sample]:
    """Return the update's samples with what is picked of them: one token after the other, as papers say."""
    tokens = [(i, t) for i in update for t in range(len(old[i])) if samples[i].loss_mask[t + 1]]
    behaviour = {i: samples[i].streams["behaviour_logprobs"] for i in update}
    squares = {(i, t): (old[i][t].item() - behaviour[i][t + 1]) ** 2 for i, t in tokens}
    means = [np.mean([values[i][t] for i, t in tokens]) for values in (old,)]
    means.append(np.mean([samples[i].streams["advantages"] for i, _ in tokens]))
    covariance = {
        (i, t): (old[i][t].item() - means[0]) * (samples[i].streams["advantages"] - means[1])
        for i, t in tokens
    }
    picked: set[tuple[int, int]] = set()
    if bounds := [one.largest_moment for one in rejections_of(learner) if isinstance(one, SecondMoment)]:
        left = sorted(tokens, key=squares.get)
        while left and np.mean([squares[token] for token in left]) > bounds[0]:
            picked.add(left.pop())
    elif isinstance(learner.loss, KLCovLoss):
        picked = set(sorted(tokens, key=covariance.get)[-int(len(tokens) * learner.loss.picked_fraction) :])
    elif isinstance(learner.loss, ClipCovLoss):
        low, high = learner.loss.lowest_covariance, learner.loss.highest_covariance
        picked = {token for token in tokens if low < covariance[token] < high}
    marks = {i: torch.tensor([(i, t) in picked for t in range(len(old[i]))]) for i in update}
    return {
        i: PickedSample(
            token_ids=samples[i].token_ids, loss_mask=samples[i].loss_mask, streams=samples[i].streams,
            source=samples[i].source, kept=samples[i].kept, picked=marks[i],
        )
        for i in update
    }  # fmt: skip
