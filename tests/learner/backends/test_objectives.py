"""Objectives that look at other policies train as transformers with torch's AdamW does, on every layout."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bus.errors import TrainingError
from bus.kept_sets import KeptSets
from learner.algorithms.losses.objective import Objective
from learner.algorithms.selection import with_selections
from learner.backends.contract.backend import StepResult
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.trainer import Trainer
from learner.config.batch import BatchConfig
from learner.config.correction import (
    BinaryKL,
    BinaryKLTwoWay,
    BinaryTV,
    NegativeDivergence,
    PluginCorrection,
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
from learner.data.packing import Sample, pack
from learner.logprobs.logprobs import with_logprobs
from tests.learner.choices import CORRECTIONS, LOSSES, REJECTIONS
from tests.learner.division import divide_world
from tests.learner.objective_formulas import (
    POLICY_VERSION,
    TEMPERATURE,
    estimated,
    picked_by_formula,
    rejections_of,
    sample_logprobs,
    token_losses,
)
from tests.learner.reference import reference_optimizer
from tests.learner.tiny import VOCAB, hf_state, random_samples, tiny_config, tiny_model

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
"""Optimizer with an eps that keeps rounding errors of gradients near 0 from becoming whole updates."""
STEPS = 2
WEIGHTS = (1.0, 0.25, 1.75)
"""Importance weights of the groups that samples are of, which weigh all terms of their loss."""
BATCH = BatchConfig(tokens_per_micro_batch=56, logprob_tokens_per_micro_batch=64)


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
    "traces": {"correction": PluginCorrection(function=f"{__name__}:traces", settings={"least": 0.3})},
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
                trainer.train_step(pack(chosen, 56), Objective.of(learner), policy_version=POLICY_VERSION)
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
    samples = [
        replace(sample.with_streams(group_weights=WEIGHTS[n % 3]), source=source_of(n))
        for n, sample in enumerate(samples)
    ]
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
                losses = token_losses(learner, picked[i], logprobs[i], old[i], of_sample)
                total += WEIGHTS[i % 3] * losses[mask].sum()
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
            assert step.diagnostics["reference_k3_nats"] == pytest.approx(k3, abs=1e-5, rel=2e-5)
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


@pytest.mark.first(12, others=pytest.mark.slow)
@pytest.mark.parametrize("objective", [marked(name) for name in OBJECTIVES])
def test_steps_follow_plain_torch_adamw(objective):
    assert_as_expected(Case(objective), *trained_alone(objective))


def test_everything_that_there_is_is_trained_here():
    learners = [Case(name).learner for name in OBJECTIVES]
    assert {one.loss.type for one in learners} == set(LOSSES)  # sft is trained in test_parallelisms.py
    corrections = [one.used_correction for one in learners]
    assert {one.type for one in corrections} == {*CORRECTIONS, "plugin"}
    assert {getattr(one, "bound", "truncate") for one in corrections} == {"truncate", "clip", "mask"}
    rejections = {one.type for learner in learners for one in rejections_of(learner)}
    assert rejections == {*REJECTIONS, "none"}
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


@pytest.mark.first(3, others=pytest.mark.slow)
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


@pytest.mark.first(6, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "objective"), [*objectives_on_layouts()])
def test_steps_follow_plain_torch_adamw_on_any_layout(worlds, layout, objective):
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
    result = trainer.train_step(pack(samples, 56), Objective.of(learner), policy_version=3)
    assert abs(result.diagnostics["reference_k1_nats"]) < 1e-6
    assert abs(result.diagnostics["reference_k3_nats"]) < 1e-8


def test_a_loss_whose_passes_were_forgotten_trains_nothing():
    model = tiny_model()
    config = OPTIMIZER.model_copy(update={"max_skipped_in_a_row": 2})
    trainer = Trainer(model.config, hf_state(model), config)
    batches, objective = pack(samples_of(0), 56), Objective.of(Case("k3 in the loss").learner)
    first = trainer.train_step(batches, objective, policy_version=3)
    assert first.skipped
    with pytest.raises(TrainingError, match="loss nan"):
        trainer.train_step(batches, objective, policy_version=3)
