"""Objectives that look at other policies train as transformers with torch's AdamW does, on every layout."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, product
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bus.errors import TrainingError
from bus.kept_sets import KeptSets
from learner.algorithms.objective import CORRECTIONS, LOSSES, REJECTIONS, Objective
from learner.algorithms.selection import with_selections
from learner.backends.base import StepResult
from learner.backends.megatron.core import parallel_state
from learner.backends.megatron.trainer import Trainer
from learner.config.batch import BatchConfig
from learner.config.correction import (
    BinaryKL,
    BinaryKLTwoWay,
    BinaryTV,
    NegativeDivergence,
    SecondMoment,
    SequenceRange,
    SequenceTIS,
    TokenRange,
    TokenTIS,
    Veto,
)
from learner.config.frozen_policies import ReferenceConfig, TeacherConfig
from learner.config.learner import LearnerConfig
from learner.config.loss import (
    AIPOLoss,
    CISPOLoss,
    ClipCovLoss,
    GMPOLoss,
    GSPOLoss,
    KLCovLoss,
    PPOClipLoss,
    RegressionLoss,
    SAPOLoss,
    TOPRLoss,
    VESPOLoss,
)
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.config.plugin import Plugin
from learner.data.packing import Sample, pack
from learner.scoring.logprobs import with_logprobs
from tests.learner.division import divide_world
from tests.learner.reference import reference_optimizer
from tests.learner.tiny import VOCAB, hf_state, random_samples, reference_logits, tiny_config, tiny_model

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
"""Optimizer with an eps that keeps rounding errors of gradients near 0 from becoming whole updates."""
STEPS = 4
TEMPERATURE = 0.8
BATCH = BatchConfig(tokens_per_micro_batch=40, logprob_tokens_per_micro_batch=64)


def reference(**settings: object) -> dict[str, object]:
    return {"reference": ReferenceConfig(kl_coef=0.3, **settings)}


OBJECTIVES = {
    "k1 in the loss": reference(kl_estimator="k1"),
    "k2 in the loss": reference(kl_estimator="k2"),
    "k3 in the loss": reference(),
    "unbiased low variance": reference(kl_estimator="low_var_kl", kl_unbiased=True),
    "k1 in the advantage": reference(kl_estimator="k1", kl_in="advantage"),
    "k3 in the advantage": reference(kl_in="advantage"),
    "teacher": {"teacher": TeacherConfig(path=Path("a directory"), coef=0.5)},
    "both, clipped": reference()
    | {"teacher": TeacherConfig(path=Path("a directory")), "loss": PPOClipLoss()},
    "decoupled": reference() | {"loss": PPOClipLoss(centre="proximal", clip_eps=0.05)},
    "decoupled, penalised": reference(kl_in="advantage")
    | {"loss": PPOClipLoss(centre="proximal", clip_eps=0.05), "correction": TokenTIS(truncation_cap=1.1)},
}
OBJECTIVES["two teachers"] = {
    "teacher": TeacherConfig(path=Path("a directory"), coef=0.5, sources=("even", "fourth")),
    "teachers": {"other": TeacherConfig(path=Path("another"), coef=0.25, sources=("fourth",))},
}
OBJECTIVES["top-k teacher"] = {
    "teacher": TeacherConfig(path=Path("a directory"), coef=0.5, kl="top_k", top_k=5)
}
OBJECTIVES["kept sets, two top-k teachers, decoupled"] = {
    "loss": PPOClipLoss(centre="proximal", clip_eps=0.05),
    "teacher": TeacherConfig(
        path=Path("a directory"), kl="top_k", top_k=4, direction="forward", sources=("even", "fourth")
    ),
    "teachers": {
        "other": TeacherConfig(path=Path("another"), coef=0.25, kl="top_k", top_k=64, sources=("odd",))
    },
}
OBJECTIVES["kept sets"] = reference() | {"entropy_coef": 0.1}
OBJECTIVES["kept sets, clipped by sequence"] = {
    "loss": GSPOLoss(sequence_clip_eps=0.1, sequence_clip_eps_high=0.2)
}
OBJECTIVES |= {
    "entropy bonus": {"entropy_coef": 0.2},
    "sequences": {"loss": GSPOLoss(sequence_clip_eps=0.1, sequence_clip_eps_high=0.2), "entropy_coef": 0.1},
    "traces": {"correction": Plugin(function=f"{__name__}:traces", settings={"least": 0.3})},
    "decoupled, unbiased": reference(kl_unbiased=True) | {"loss": PPOClipLoss(centre="proximal")},
}
OBJECTIVES |= {
    "dual clip": {"loss": PPOClipLoss(clip_eps=0.1, dual_clip=1.1)},
    "cispo": {"loss": CISPOLoss(lowest_weight=0.9, highest_weight=1.1)},
    "sapo": {"loss": SAPOLoss(temperature=2.0, temperature_negative=4.0)},
    "topr": {"loss": TOPRLoss()},
    "sequence tis": {"correction": SequenceTIS(sequence_cap=1.2)},
    "geometric tis": {"correction": SequenceTIS(over="mean", sequence_cap=1.02)},
    "token range": {"rejection": TokenRange(lowest=0.9, highest=1.1)},
    "binary tv": {"rejection": BinaryTV(largest_change=0.002)},
    "binary kl": {"rejection": BinaryKL(largest_kl=1e-4), "loss": PPOClipLoss()},
    "sequence range": {"rejection": SequenceRange(lowest_of_sequence=0.9, highest_of_sequence=1.1)},
    "masked sequences": {
        "correction": SequenceTIS(sequence_cap=inf),
        "rejection": SequenceRange(over="product", lowest_of_sequence=0.8, highest_of_sequence=1.5),
    },
    "veto": {"rejection": Veto(smallest=0.85)},
    "negative divergence": {"rejection": NegativeDivergence(largest_drop=0.01)},
}
OBJECTIVES |= {
    "aipo": {"loss": AIPOLoss(ratio_cap=1.1)},
    "gmpo": {"loss": GMPOLoss(log_clip=0.1, log_clip_high=0.05)},
    "vespo": {"loss": VESPOLoss()},
    "regression": {"loss": RegressionLoss(kl_weight=0.5)},
    "clip-cov": {"loss": ClipCovLoss(picked_fraction=1.0, lowest_covariance=0.3)},
    "kl-cov": {"loss": KLCovLoss(picked_fraction=0.1)},
    "clipped weights": {"correction": TokenTIS(truncation_cap=1.5, bound="clip", floor=0.8)},
    "masked weights": {"correction": TokenTIS(truncation_cap=1.8, bound="mask")},
    "clipped sequences": {"correction": SequenceTIS(sequence_cap=4.0, bound="clip")},
    "second moment": {"rejection": SecondMoment(largest_moment=0.2), "correction": TokenTIS()},
    "decoupled, second moment": {
        "rejection": SecondMoment(largest_moment=0.2),
        "loss": PPOClipLoss(centre="proximal"),
    },
    "kpop": {"rejection": BinaryKLTwoWay(largest_kl_either_way=0.005)},
    "first pass": {"loss": PPOClipLoss(centre="proximal"), "correction": TokenTIS(truncation_cap=1.1)},
    "decoupled, interpolated": {
        "loss": PPOClipLoss(centre="proximal", clip_eps=0.02, proximal="interpolated")
    },
}
OBJECTIVES["several rejections"] = {
    "correction": TokenTIS(truncation_cap=1.8, bound="mask"),
    "rejection": SequenceRange(lowest_of_sequence=0.8, highest_of_sequence=1.4),
    "rejections": {
        "impossible": Veto(smallest=0.2),
        "largest": SecondMoment(largest_moment=0.2),
        "away": TokenRange(lowest=0.6, highest=1.6),
    },
}
UPDATES = {name: 2 if "decoupled" in name else 1 for name in OBJECTIVES}


def traces(log_ratio: Tensor, sequence: Tensor, *, least: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weigh each token by the product of all ratios up to it, each at most 1; leave out what weighs little.

    Its result depends on the order of a sequence's tokens, and on all of them.
    """
    weights = torch.empty_like(log_ratio)
    for number in sequence.unique():
        of_sequence = sequence == number
        weights[of_sequence] = log_ratio[of_sequence].clamp(max=0).cumsum(0).exp()
    return weights, weights >= least, {"truncated_tokens": (log_ratio > 0).sum()}


@dataclass(frozen=True)
class Case:
    """An objective on a layout."""

    objective: str
    ranks: int = 1
    layout: dict[str, object] = field(default_factory=dict)

    @property
    def learner(self) -> LearnerConfig:
        batch = BATCH.model_copy(update={"updates": UPDATES[self.objective]})
        return LearnerConfig(batch=batch, **OBJECTIVES[self.objective])


LAYOUTS = {
    "dp2 overlapped": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "cp2 short whole": (2, {"context": 2, "context_min_tokens": 18}),
}
POLICY_VERSION = 3
POLICY, REFERENCE, TEACHER, OTHER_TEACHER = 0, 1, 2, 3
"""Seeds of their weights."""
FROZEN = {"reference": REFERENCE, "teacher": TEACHER, "teacher.other": OTHER_TEACHER}


@cache
def state_of(seed: int) -> dict[str, Tensor]:
    """Return the weights of a policy, which nobody changes."""
    return hf_state(tiny_model(seed=seed))


def train(case: Case) -> tuple[list[StepResult], dict[str, Tensor]]:
    """Return what each update did, and the weights then; on a rank of a world."""
    parallel = ParallelConfig(**case.layout)
    divide_world(parallel)
    config = tiny_config()
    trainer = Trainer(config, state_of(POLICY), OPTIMIZER, parallel=parallel)
    for tag, seed in FROZEN.items():
        trainer.frozen.load(tag, config, state_of(seed), Path("elsewhere"))
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    learner, results = case.learner, []
    for step in range(STEPS):
        own = range(rank, len(LENGTHS), ranks)
        samples = [samples_of(step, case.objective)[i] for i in own]
        samples = with_logprobs(trainer, samples, learner)
        for n in range(learner.batch.updates):
            chosen = [sample for i, sample in zip(own, samples, strict=True) if i in of_update(n, learner)]
            chosen = with_selections(chosen, learner, trainer.data_parallel_group)
            results.append(
                trainer.train_step(pack(chosen, 40), Objective.of(learner), policy_version=POLICY_VERSION)
            )
    return results, trainer.export()


@cache
def trained_alone(objective: str) -> tuple[list[StepResult], dict[str, Tensor]]:
    """Return what `train` does in a world of one, to tests that look at it in several ways."""
    return train(Case(objective))


def of_update(number: int, learner: LearnerConfig) -> list[int]:
    """Return which samples the update is on: two, not the next two, and so on."""
    return [i for i in range(len(LENGTHS)) if i // 2 % learner.batch.updates == number]


def samples_of(step: int, objective: str = "") -> list[Sample]:
    samples = random_samples(LENGTHS, seed=step, versions=(1, 3), temperatures=TEMPERATURE)
    samples = [replace(sample, source=source_of(n)) for n, sample in enumerate(samples)]
    if not objective.startswith("kept sets"):
        return samples
    return [replace(sample, kept=kept_sets_of(sample, step)) for sample in samples[:-1]] + samples[-1:]


def kept_sets_of(sample: Sample, seed: int) -> KeptSets:
    """Sets of 1 to 12 tokens with the sample's own among them, and none for some of its tokens."""
    draw, sets = np.random.default_rng([seed, len(sample.token_ids)]), []
    for token in sample.token_ids:
        others = draw.choice(VOCAB, draw.integers(0, 12), replace=False)
        ids = np.unique([token, *others]).astype(np.int32)
        sets.append(ids if draw.random() < 0.8 else ids[:0])
    return KeptSets.of(sets)


def source_of(number: int) -> str:
    return "fourth" if number % 4 == 0 else "odd" if number % 2 else "even"  # "odd" is all of dp2's rank 1


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


@cache
def frozen_logprobs(step: int, kept_sets: bool) -> dict[str, list[Tensor]]:
    """Return the `sample_logprobs` of each frozen policy, which are the same for all objectives."""
    samples = samples_of(step, "kept sets" if kept_sets else "")
    with torch.no_grad():
        return {tag: sample_logprobs(tiny_model(seed=seed), samples) for tag, seed in FROZEN.items()}


@cache
def expected(objective: str) -> tuple[list[tuple[float, float, float]], dict[str, Tensor]]:
    """Loss, gradient norm and k3 to the reference of every update, by transformers and torch alone."""
    learner, policy = Case(objective).learner, tiny_model(seed=POLICY)
    optimizer, found = reference_optimizer(policy, OPTIMIZER), []
    for step in range(STEPS):
        samples = samples_of(step, objective)
        logprobs = sample_logprobs(policy, samples)
        old = [each[0].detach() for each in logprobs]
        frozen = frozen_logprobs(step, objective.startswith("kept sets"))
        for n in range(learner.batch.updates):
            total, k3, count = 0.0, 0.0, 0
            logprobs = sample_logprobs(policy, samples) if n else logprobs
            picked = picked_by_formula(learner, samples, old, of_update(n, learner))
            for i in of_update(n, learner):
                mask = torch.from_numpy(samples[i].loss_mask[1:])
                of_sample = {tag: values[i] for tag, values in frozen.items()}
                total += token_losses(learner, picked[i], logprobs[i], old[i], of_sample)[mask].sum()
                k3 += estimated("k3", logprobs[i][0].detach() - frozen["reference"][i][0])[mask].sum().item()
                count += int(mask.sum())
            optimizer.zero_grad()
            (total / count).backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            found.append((total.item() / count, norm.item(), k3 / count))
    return found, hf_state(policy)


def assert_as_expected(case: Case, steps: list[StepResult], weights: dict[str, Tensor]) -> None:
    expected_steps, expected_weights = expected(case.objective)
    for step, (loss, norm, k3) in zip(steps, expected_steps, strict=True):
        assert step.loss == pytest.approx(loss, abs=1e-5, rel=1e-5)
        assert step.grad_norm == pytest.approx(norm, abs=5e-5, rel=2e-5)
        if case.learner.reference.kl_coef:
            assert step.diagnostics["reference_k3_nats"] == pytest.approx(k3, abs=1e-5, rel=1e-5)
        else:
            assert "reference_k3_nats" not in step.diagnostics
    for name, weight in expected_weights.items():
        assert (weights[name] - weight).abs().max() < 2e-5


VARIANTS = (
    "k1 in the loss", "k2 in the loss", "k3 in the advantage", "both, clipped", "decoupled, penalised",
    "kept sets, two top-k teachers, decoupled", "kept sets, clipped by sequence", "decoupled, unbiased",
    "geometric tis", "clipped weights", "masked weights", "clipped sequences", "masked sequences",
    "decoupled, second moment",
)  # fmt: skip
"""Objectives whose parts others have too."""


def marked(objective: str) -> object:
    """Return an objective as a parameter, marked by when it is tested."""
    return pytest.param(objective, marks=pytest.mark.slow) if objective in VARIANTS else objective


@pytest.mark.parametrize("objective", [marked(name) for name in OBJECTIVES])
def test_four_steps_follow_plain_torch_adamw(objective):
    assert_as_expected(Case(objective), *trained_alone(objective))


def test_everything_that_there_is_is_trained_here():
    learners = [Case(name).learner for name in OBJECTIVES]
    assert {one.loss.type for one in learners} == set(LOSSES) - {"sft"}  # trained in test_parallelisms.py
    corrections = [one.used_correction for one in learners]
    assert {one.type for one in corrections} == {*CORRECTIONS, "plugin", "none"}
    assert {getattr(one, "bound", "truncate") for one in corrections} == {"truncate", "clip", "mask"}
    rejections = {one.type for learner in learners for one in rejections_of(learner)}
    assert rejections == {*REJECTIONS, "second_moment", "none"}
    references = [one.reference for one in learners if one.reference.kl_coef]
    assert {one.kl_estimator for one in references} == {"k1", "k2", "k3", "low_var_kl"}
    assert {one.kl_in for one in references} == {"loss", "advantage"}  # the reward is test_trained_advantages
    assert {Objective.of(one).proximal for one in learners} == {
        None,
        "recomputed",
        "first_pass",
        "interpolated",
    }
    teachers = [teacher for one in learners for teacher in one.used_teachers.values()]
    assert {(one.kl, one.direction) for one in teachers} == {
        ("sampled", "reverse"), ("top_k", "reverse"), ("top_k", "forward")
    }  # fmt: skip


@pytest.mark.parametrize("objective", ["clip-cov", "aipo", "gmpo", "decoupled, interpolated"])
def test_what_a_loss_clips_is_some_of_the_tokens(objective):
    clipped = [step.diagnostics["clipped_fraction"] for step in trained_alone(objective)[0]]
    assert 0 < max(clipped) < 1


@pytest.mark.parametrize(
    "objective", [marked(name) for name in OBJECTIVES if "rejection" in OBJECTIVES[name]]
)
def test_each_rejection_leaves_some_tokens_out_and_trains_on_others(objective):
    steps, _ = trained_alone(objective)
    assert all(0 < step.diagnostics["rejected_fraction"] < 1 for step in steps)
    assert all(step.denominator == step.tokens for step in steps)  # from before the rejection


DIVIDED = (
    "k3 in the loss", "k1 in the advantage", "decoupled", "sequences", "traces", "masked sequences",
    "several rejections", "topr", "regression", "decoupled, second moment",
    "kept sets, two top-k teachers, decoupled", "two teachers", "kept sets", "kept sets, clipped by sequence",
)  # fmt: skip
"""Objectives whose parts see several tokens, or several ranks, at a time. Their order chooses their layouts
of the slow suite: likeliest tokens are looked for by tensor ranks, whole sequences by context ranks."""


def objectives_on_layouts() -> Iterator[object]:
    """Yield pairs: nightly all, and in the slow suite two layouts of each objective."""
    for (m, layout), (n, objective) in product(enumerate(LAYOUTS), enumerate(DIVIDED)):
        yield pytest.param(layout, objective, marks=() if (m + n) % 3 == 0 else pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "objective"), [*objectives_on_layouts()])
def test_four_steps_follow_plain_torch_adamw_on_any_layout(worlds, layout, objective):
    case = Case(objective, *LAYOUTS[layout])
    answers = worlds.run(case.ranks, train, case)
    assert all(steps == answers[0][0] for steps, _ in answers)
    assert_as_expected(case, *answers[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "counted"),
    [
        ("traces", ("truncated_fraction", "rejected_fraction")),
        ("clipped sequences", ("truncated_fraction", "truncated_fraction_positive", "importance_ratio_p99")),
    ],
)
def test_a_correction_sees_whole_sequences_whose_tokens_are_divided_over_ranks(worlds, objective, counted):
    case = Case(objective, *LAYOUTS["cp2"])
    answers = worlds.run(case.ranks, train, case)
    assert_as_expected(case, *answers[0])
    alone, _ = trained_alone(objective)
    for (steps, _), name in product(answers, counted):
        found = [step.diagnostics[name] for step in steps]
        assert found == pytest.approx([step.diagnostics[name] for step in alone], abs=1e-6)
        assert max(found) > 0


def test_at_the_first_step_the_policy_is_its_own_reference():
    model = tiny_model()
    trainer = Trainer(model.config, hf_state(model), OPTIMIZER)
    trainer.frozen.hold("reference")
    learner = Case("k3 in the loss").learner
    samples = with_logprobs(trainer, samples_of(0), learner)
    result = trainer.train_step(pack(samples, 40), Objective.of(learner), policy_version=3)
    assert abs(result.diagnostics["reference_k1_nats"]) < 1e-6
    assert abs(result.diagnostics["reference_k3_nats"]) < 1e-8


def test_a_loss_whose_passes_were_forgotten_trains_nothing():
    model = tiny_model()
    config = OPTIMIZER.model_copy(update={"max_skipped_in_a_row": 2})
    trainer = Trainer(model.config, hf_state(model), config)
    batches, objective = pack(samples_of(0), 40), Objective.of(Case("k3 in the loss").learner)
    first = trainer.train_step(batches, objective, policy_version=3)
    assert first.skipped
    with pytest.raises(TrainingError, match="loss nan"):
        trainer.train_step(batches, objective, policy_version=3)
