"""Keep masks, shared prefixes, a critic and several teachers: together each does what it does alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bus.kept_sets import KeptSets
from learner.algorithms.losses.objective import Objective
from learner.backends.megatron.trainer import Trainer
from learner.config.advantage import GAEAdvantage
from learner.config.batch import BatchConfig
from learner.config.critic import CriticConfig
from learner.config.frozen_policies import ReferenceConfig, TeacherConfig
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import Sample, pack
from learner.data.top_tokens import TopTokens
from learner.logprobs.logprobs import with_logprobs
from learner.step.rl_step import train_on
from tests.learner.critics import source_of, tiny_critic
from tests.learner.siblings import siblings
from tests.learner.tiny import VOCAB, hf_state, tiny_model
from tests.learner.world.ranks_worker import group

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
BUDGET = 200
TEACHERS = {
    "teacher": TeacherConfig(path=Path("one"), coef=0.5, sources=("a",)),
    "teachers": {
        "of all": TeacherConfig(path=Path("two"), coef=0.25),
        "top": TeacherConfig(path=Path("three"), kl="top_k", top_k=6, sources=("b",)),
    },
}
OBJECTIVES = {
    "kept sets, teachers": TEACHERS,
    "kept sets": {"reference": ReferenceConfig(kl_coef=0.2)},
    "teachers": TEACHERS,
}


def trainer_of(critic: CriticConfig | None = None) -> Trainer:
    policy = tiny_model()
    source = None if critic is None else source_of(tiny_critic(), critic)
    trainer = Trainer(policy.config, hf_state(policy), OPTIMIZER, critic=source)
    for seed, tag in enumerate(("reference", "teacher", "teacher.of all", "teacher.top"), start=1):
        model = tiny_model(seed=seed)
        trainer.frozen.load(tag, model.config, hf_state(model), Path(tag))
    return trainer


def samples_of(step: int, *, kept: bool) -> list[Sample]:
    """Two prompts of different sources; with kept sets, each trained token has one or none."""
    samples = [replace(s, source="ab"[s.group]) for s in siblings(seed=step)]
    return [replace(s, kept=kept_sets_of(s.token_ids, n)) for n, s in enumerate(samples)] if kept else samples


def kept_sets_of(token_ids: np.ndarray, seed: int) -> KeptSets:
    draw = np.random.default_rng(seed)
    sets = [np.unique([token, *draw.integers(0, VOCAB, 5)]).astype(np.int32) for token in token_ids]
    return KeptSets.of([each if draw.random() < 0.8 else each[:0] for each in sets])


def steps_of(name: str, *, share: bool):
    batch = BatchConfig(tokens_per_micro_batch=BUDGET, share_prefixes=share)
    learner, trainer, results = LearnerConfig(batch=batch, **OBJECTIVES[name]), trainer_of(), []
    for step in range(2):
        samples = with_logprobs(trainer, samples_of(step, kept="kept sets" in name), learner)
        batches = pack(samples, BUDGET, share_prefixes=share)
        results.append(trainer.train_step(batches, Objective.of(learner), policy_version=3))
    return results, trainer.export()


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_shared_prefixes_change_nothing_beside(name):
    (steps, weights), (others, other_weights) = (steps_of(name, share=share) for share in (True, False))
    for step, other in zip(steps, others, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=2e-6, abs=2e-6)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert step.diagnostics == pytest.approx(other.diagnostics, rel=1e-5, abs=1e-6)
        assert step.computed_tokens < 0.7 * other.computed_tokens
        assert ("teacher_kl_nats" in step.diagnostics) == ("teachers" in name)
    for key, weight in weights.items():
        assert (weight - other_weights[key]).abs().max() < 1e-5, key


def one_prompt(number: int, *, kept: bool) -> list:
    """The two trajectories of a group behind a prompt of 40 tokens, which is worth sharing."""
    found = []
    for t in group(number):
        prompt = np.arange(40, dtype=np.int32) % 7

        def behind(values: np.ndarray, fill: float, before: int = 40) -> np.ndarray:
            return np.append(np.full(before, fill, values.dtype), values)

        token_ids = np.append(prompt, t.token_ids)
        loss_mask = behind(t.loss_mask, 0)
        sets = kept_sets_of(token_ids, number).only(loss_mask)
        found.append(
            replace(
                t,
                token_ids=token_ids,
                loss_mask=loss_mask,
                behaviour_logprobs=behind(t.behaviour_logprobs, 0),
                policy_versions=behind(t.policy_versions, -1),
                kept_counts=sets.counts.tobytes() if kept else b"",
                kept_tokens=sets.token_ids.tobytes() if kept else b"",
                turns=tuple(turn._replace(start=turn.start + 40, stop=turn.stop + 40) for turn in t.turns),
            )
        )
    return found


def step_with_critic(*, kept: bool, share: bool):
    critic = CriticConfig(level="token")
    batch = BatchConfig(tokens_per_micro_batch=BUDGET, share_prefixes=share)
    learner = LearnerConfig(advantage=GAEAdvantage(), critic=critic, batch=batch)
    trainer = trainer_of(critic)
    groups = [one_prompt(number, kept=kept) for number in (1, 2)]
    _, result = train_on(trainer, groups, [1.0, 1.0], learner, step=1, policy_version=4)
    weights = {n: p.detach().clone() for n, p in trainer.critic.chunks[0].named_parameters()}
    return result, weights


@pytest.mark.slow
def test_a_critic_learns_the_same_whatever_the_policy_shares_and_sampling_kept():
    plain, weights = step_with_critic(kept=False, share=False)
    for kept, share in ((False, True), (True, False), (True, True)):
        result, found = step_with_critic(kept=kept, share=share)
        assert result.critic == pytest.approx(plain.critic, rel=1e-5, abs=1e-7)
        for name, weight in found.items():  # kept sets are none of the critic's business
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-5 if share else 0, msg=name)
        assert (result.computed_tokens < plain.computed_tokens) == share
        same = result.loss == pytest.approx(plain.loss, rel=1e-6, abs=1e-6)
        assert same != kept  # kept sets change the policy's log-probs, and those alone


def test_teachers_of_whole_distributions_have_sources_of_their_own():
    def teacher(*sources: str, **settings: object) -> TeacherConfig:
        return TeacherConfig(path=Path("x"), sources=sources, **{"kl": "top_k", "top_k": 4, **settings})

    LearnerConfig(teacher=teacher("a"), teachers={"other": teacher("b")})
    LearnerConfig(teacher=teacher(), teachers={"other": TeacherConfig(path=Path("x"))})
    with pytest.raises(ValueError, match=r"the teacher and the teacher.other both have kl=top_k.*source 'b'"):
        LearnerConfig(teacher=teacher("a", "b"), teachers={"other": teacher("b")})
    with pytest.raises(ValueError, match="both have kl=top_k and teach the same trajectories"):
        LearnerConfig(teacher=teacher("a"), teachers={"other": teacher()})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"kl": "top_k"}, "needs the number of tokens: set top_k"),
        ({"top_k": 4}, "have no effect with kl=sampled"),
        ({"direction": "forward"}, "have no effect with kl=sampled"),
        ({"kl": "top_k", "top_k": 65}, "less than or equal to 64"),
        ({"kl": "top_k", "top_k": 4, "path": None}, "needs a teacher: set path"),
    ],
)
def test_settings_of_a_teacher_that_do_not_go_together_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        TeacherConfig(**{"path": Path("x"), **settings})


def test_top_tokens_lie_where_they_are_predicted():
    top = TopTokens(np.array([[-1, -1], [4, 2], [3, 1]], np.int32), np.full((3, 3), -2.0, np.float32))
    streams = {"behaviour_logprobs": -1.0}
    mask = np.array([False, True, True])
    taught = Sample(token_ids=np.arange(3, dtype=np.int32), loss_mask=mask, streams=streams, taught=top)
    [batch] = pack([taught, replace(taught, taught=None)], 100)
    assert batch.teacher_token_ids.tolist() == [[4, 2], [3, 1], *[[-1, -1]] * 4]
    assert batch.teacher_logprobs[:2].tolist() == [[-2.0] * 3] * 2
    assert torch.isinf(batch.teacher_logprobs[2:]).all()
