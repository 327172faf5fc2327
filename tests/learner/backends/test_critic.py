"""A critic trains as a model of transformers with one output does under torch's AdamW, and PPO with it."""

from functools import cache

import numpy as np
import pytest
import torch

from bus.errors import ConfigError, TrainingError
from learner.backends.contract.backend import CriticSource
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.trainer import Trainer
from learner.config.advantage import GAEAdvantage
from learner.config.batch import BatchConfig
from learner.config.critic import CriticConfig, CriticOptimizerConfig
from learner.config.learner import LearnerConfig
from learner.config.optimizer import CosineSchedule, OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.batches import recorded_samples
from learner.data.packing import pack
from learner.logprobs.logprobs import with_values
from learner.step.rl_step import train_on
from tests.learner.backends.trained_groups import groups_of, logprobs
from tests.learner.critics import credit_of, source_of, tiny_critic, values_of
from tests.learner.division import divide_world
from tests.learner.muon_reference import ReferenceMuon
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import hf_state, random_samples, tiny_model

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
CRITIC_OPTIMIZER = CriticOptimizerConfig(
    lr=5e-3, weight_decay=0.2, eps=1e-4, warmup_steps=2, schedule=CosineSchedule(decay_steps=5)
)
LENGTHS = [5, 17, 2, 32, 9]
STEPS = 2


def trainer_with(critic: CriticSource, layout: dict[str, object] | None = None, policy=None) -> Trainer:
    policy = policy or tiny_model()
    parallel = ParallelConfig(**(layout or {}))
    return Trainer(policy.config, hf_state(policy), OPTIMIZER, parallel=parallel, critic=critic)


def critic_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of this rank's weights of the critic, by their own names."""
    return {
        name: p.detach().clone() for chunk in trainer.critic.chunks for name, p in chunk.named_parameters()
    }


def learned(step: int):
    """Samples with values before the step, some of which the critic is far from by then, and targets."""
    draw = np.random.default_rng([9, step])
    samples = random_samples(LENGTHS, seed=step)
    return [
        s.with_streams(
            group_weights=(1.0, 0.25, 1.75)[n % 3],
            values=draw.normal(0, 0.5, len(s.token_ids)).astype(np.float32),
            value_targets=np.where(
                draw.random(len(s.token_ids)) < 0.8, draw.normal(1, 1, len(s.token_ids)), np.nan
            ).astype(np.float32),
        )
        for n, s in enumerate(samples)
    ]


def reference_update(critic, optimizer, samples, config: CriticConfig, lr: float) -> tuple[float, float]:
    """PPO2's clipped value loss over everything that is learned, in one batch; loss and gradient norm."""
    total, count = 0.0, 0
    for s in samples:
        values = values_of(critic, s.token_ids)
        old, target = (torch.from_numpy(s.streams[n][1:]) for n in ("values", "value_targets"))
        here = torch.from_numpy(s.loss_mask[1:]) & ~torch.isnan(target)
        values, old, target = values[here], old[here], target[here]
        held = old + torch.clamp(values - old, -config.value_clip, config.value_clip)
        losses = 0.5 * torch.maximum((values - target) ** 2, (held - target) ** 2)
        total = total + s.streams.get("group_weights", 1.0) * losses.sum()
        count += int(here.sum())
    loss = config.loss_coef * total / count
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item()


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("family", "changes", "kind"),
    [
        ("qwen3", {"tied": True}, "adamw"),
        ("llama", {"hidden_size": 32, "num_hidden_layers": 1}, "adamw"),
        ("deepseek_v3", {}, "adamw"),
        pytest.param("gpt_oss", {}, "adamw", marks=pytest.mark.nightly),
        ("qwen3_next", {}, "adamw"),
        pytest.param("qwen3", {}, "muon", marks=pytest.mark.slow),
    ],
)
def test_updates_are_those_of_transformers_with_torch_adamw(family, changes, kind):
    settings = CRITIC_OPTIMIZER.model_copy(update={"matrices": kind})
    config = CriticConfig(train="always", value_clip=0.3, loss_coef=0.7, optimizer=settings)
    reference = tiny_critic(family, **changes)
    trainer = trainer_with(source_of(reference, config))
    optimizer = {"adamw": reference_optimizer, "muon": ReferenceMuon}[kind](reference, settings)
    rates = [2.5e-3, 5e-3, 5e-3 * (1 + np.cos(np.pi / 5)) / 2]
    clipped = 0
    for step, lr in enumerate(rates):
        samples = learned(step)
        batches = pack(samples, 40)
        found = trainer.critic.values(batches)
        with torch.no_grad():
            for batch, values in zip(batches, found, strict=True):
                ids = torch.split(batch.tokens, batch.lengths)
                expected = torch.cat(
                    [torch.nn.functional.pad(values_of(reference, i.numpy()), (0, 1)) for i in ids]
                )
                torch.testing.assert_close(
                    values[batch.loss_mask], expected[batch.loss_mask], atol=1e-5, rtol=1e-5
                )
                assert torch.isnan(values[~batch.loss_mask]).all()
        update = trainer.critic.train_step(batches, config)
        assert update.lr == pytest.approx(lr)
        loss, norm = reference_update(reference, optimizer, samples, config, lr)
        assert (update.loss, update.grad_norm) == pytest.approx((loss, norm), rel=2e-5)
        assert update.clipped < update.values
        clipped += update.clipped
    assert clipped > 0
    after = trainer_with(source_of(reference, config))
    for name, weight in critic_weights(trainer).items():
        assert (weight - critic_weights(after)[name]).abs().max() < 2e-5, name


def test_what_it_explains_is_told_from_before_the_update():
    config = CriticConfig(train="always", value_clip=float("inf"))
    trainer = trainer_with(source_of(tiny_critic(), config))
    batches = pack([sample.with_streams(group_weights=1.0) for sample in learned(0)], 40)
    values = torch.cat(trainer.critic.values(batches)).double()
    targets = torch.cat([b.streams["value_targets"] for b in batches]).double()
    here = torch.cat([b.loss_mask for b in batches]) & ~torch.isnan(targets)
    errors, targets = (targets - values)[here], targets[here]
    update = trainer.critic.train_step(batches, config)
    assert update.values == int(here.sum())
    assert update.explained_variance == pytest.approx((1 - errors.var() / targets.var()).item(), rel=1e-6)
    assert update.value_mean == pytest.approx(values[here].mean().item(), rel=1e-5)
    assert update.target_mean == pytest.approx(targets.mean().item(), rel=1e-6)
    assert update.loss == pytest.approx(0.5 * errors.square().mean().item(), rel=1e-5)


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("budget", [1, 20, 1000])
def test_micro_batches_change_nothing(budget):
    config = CriticConfig(train="always", optimizer=CRITIC_OPTIMIZER)
    found = []
    for tokens in (40, budget):
        trainer = trainer_with(source_of(tiny_critic(), config))
        updates = [trainer.critic.train_step(pack(learned(step), tokens), config) for step in range(2)]
        found.append(([(u.loss, u.grad_norm, u.values, u.clipped) for u in updates], critic_weights(trainer)))
    assert [pytest.approx(u, rel=1e-5) for u in found[0][0]] == found[1][0]
    for name, weight in found[0][1].items():
        assert (weight - found[1][1][name]).abs().max() < 1e-5


def test_an_update_that_is_not_finite_changes_nothing_and_ends_the_run_when_it_goes_on():
    config = CriticConfig(train="always", optimizer=CriticOptimizerConfig(lr=1e-2, max_skipped_in_a_row=2))
    trainer = trainer_with(source_of(tiny_critic(), config))
    before = critic_weights(trainer)
    samples = [s.with_streams(value_targets=np.full(len(s.token_ids), 3e38, np.float32)) for s in learned(0)]
    update = trainer.critic.train_step(pack(samples, 40), config)
    assert update.skipped
    assert all(torch.equal(weight, before[name]) for name, weight in critic_weights(trainer).items())
    with pytest.raises(TrainingError, match=r"learner\.critic\.optimizer\.lr"):
        trainer.critic.train_step(pack(samples, 40), config)


def test_a_value_that_is_not_finite_is_refused_before_it_becomes_an_advantage():
    trainer = trainer_with(source_of(tiny_critic(), CriticConfig(train="always")))
    with torch.no_grad():
        trainer.critic.chunks[0].value_head.bias.fill_(torch.inf)
    with pytest.raises(TrainingError, match="not finite"):
        with_values(trainer, random_samples([5]), LearnerConfig())


def test_without_a_directory_it_begins_as_the_policy_with_values_of_0():
    policy = tiny_model(tied=True)
    source = CriticSource(
        config=CriticConfig(train="always"), hf_config=policy.config, state=hf_state(policy)
    )
    trainer = trainer_with(source, policy=policy)
    trainer.critic.train_step(pack(learned(0), 40), source.config)
    with torch.no_grad():
        trainer.chunks[0].decoder.final_layernorm.weight.add_(1.0)  # as a warm-up would
    trainer.critic.begin()
    theirs = dict(trainer.chunks[0].named_parameters())
    for name, weight in critic_weights(trainer).items():
        assert torch.equal(weight, theirs.get(name, torch.zeros_like(weight))), name
    batches = pack(random_samples(LENGTHS), 40)
    assert all(
        (v[b.loss_mask] == 0).all() for v, b in zip(trainer.critic.values(batches), batches, strict=True)
    )
    assert trainer.critic.train_step(pack(learned(0), 40), source.config).lr == source.config.optimizer.lr


def test_with_a_directory_it_stays_what_it_was_when_reinforcement_learning_begins():
    trainer = trainer_with(source_of(tiny_critic(), CriticConfig(train="always", path="elsewhere")))
    before = critic_weights(trainer)
    trainer.critic.begin()
    assert all(torch.equal(weight, before[name]) for name, weight in critic_weights(trainer).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score.weight": torch.zeros(3, 64)}, r"score\.weight of the critic has the shape \[3, 64\]"),
        ({"model.norm.weight": torch.zeros(7)}, r"model\.norm\.weight is \[7\], not \[64\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(changes, message):
    critic = tiny_critic()
    state = hf_state(critic) | changes
    source = CriticSource(config=CriticConfig(train="always"), hf_config=critic.config, state=state)
    with pytest.raises(ConfigError, match=message):
        trainer_with(source)


# --- PPO as a whole ---

KINDS = {
    "token": (CriticConfig(discount=0.9, trace_decay=0.8), 0.7),
    "turn": (CriticConfig(level="turn", discount=0.9), 0.95),
    "vtrace": (CriticConfig(targets="vtrace", discount=0.95, trace_decay=0.9, rho_bar=1.5), 0.9),
    "turn, vtrace": (CriticConfig(level="turn", targets="vtrace", rho_bar=2.0, c_bar=0.9), 0.5),
    "whitened, two epochs": (CriticConfig(level="turn", epochs=2, value_clip=0.05), 0.9),
}


def learner_of(kind: str, budget: int = 40) -> LearnerConfig:
    config, trace_decay = KINDS[kind]
    return LearnerConfig(
        advantage=GAEAdvantage(trace_decay=trace_decay),
        critic=config.model_copy(update={"optimizer": CRITIC_OPTIMIZER}),
        whiten_advantages=kind.startswith("whitened"),
        batch=BatchConfig(tokens_per_micro_batch=budget),
    )


@cache
def expected(kind: str):
    """Loss and gradient norm of each step's policy, losses of its critic, and all weights then."""
    learner = learner_of(kind)
    config, (_, trace_decay) = learner.critic, KINDS[kind]
    policy, critic = tiny_model(), tiny_critic()
    optimizer, of_critic = (
        reference_optimizer(policy, OPTIMIZER),
        reference_optimizer(critic, CRITIC_OPTIMIZER),
    )
    steps, done = [], 0
    for step in range(STEPS):
        flat = [t for group in groups_of("", step) for t in group]
        samples = recorded_samples([flat])
        with torch.no_grad():
            values = [np.append(np.nan, values_of(critic, t.token_ids).double()) for t in flat]
        ratios = [
            p - t.behaviour_logprobs.astype(float)
            for p, t in zip(logprobs(policy, samples), flat, strict=True)
        ]
        credit = [
            credit_of(t, v, r, config, trace_decay) for t, v, r in zip(flat, values, ratios, strict=True)
        ]
        advantages = [a for a, _ in credit]
        if learner.whiten_advantages:
            taken = np.concatenate([a[t.loss_mask] for a, t in zip(advantages, flat, strict=True)])
            advantages = [(a - taken.mean()) / taken.std(ddof=1) for a in advantages]
        taught = [
            s.with_streams(advantages=a, values=v.astype(np.float32), value_targets=g.astype(np.float32))
            for s, a, v, (_, g) in zip(samples, advantages, values, credit, strict=True)
        ]
        losses = []
        for _ in range(config.epochs):
            done += 1
            lr = 2.5e-3 if done == 1 else 5e-3 * (1 + np.cos(np.pi * (done - 2) / 5)) / 2
            losses.append(reference_update(critic, of_critic, taught, config, lr)[0])
        steps.append(
            (*reference_step(policy, optimizer, taught, loss="tis", lr=OPTIMIZER.lr), np.mean(losses))
        )
    return steps, hf_state(policy), hf_state(critic)


def train(kind: str, layout: dict[str, object], budget: int = 40):
    """What `expected` returns, by the system, on a rank of the world."""
    divide_world(ParallelConfig(**layout))
    trainer = trainer_with(source_of(tiny_critic(), learner_of(kind).critic), layout)
    learner = learner_of(kind, budget)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    steps = []
    for step in range(STEPS):
        own = groups_of("", step)[rank::ranks]
        _, result = train_on(trainer, own, [1.0] * len(own), learner, step=step + 1, policy_version=step)
        steps.append((result.loss, result.grad_norm, result.critic["value_loss"]))
    batches = pack(recorded_samples(groups_of("", 0)), budget)
    return steps, trainer.export(), [values.numpy() for values in trainer.critic.values(batches)]


def assert_as_expected(kind: str, steps, weights, values, budget: int = 40) -> None:
    expected_steps, policy, critic = expected(kind)
    for found, wanted in zip(steps, expected_steps, strict=True):
        assert found == pytest.approx(wanted, abs=2e-5, rel=1e-4)
    for key, weight in policy.items():
        assert (weights[key] - weight).abs().max() < 5e-5, key
    trained = tiny_critic()
    trained.load_state_dict(critic)
    batches = pack(recorded_samples(groups_of("", 0)), budget)
    with torch.no_grad():
        for batch, found in zip(batches, values, strict=True):
            ids = torch.split(batch.tokens, batch.lengths)
            wanted = torch.cat([torch.nn.functional.pad(values_of(trained, i.numpy()), (0, 1)) for i in ids])
            assert np.abs(found - wanted.numpy())[batch.loss_mask.numpy()].max() < 2e-4


IN_EVERY_RUN = ("token", "turn, vtrace")
"""Kinds that are not marked slow."""


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize(
    "kind", [kind if kind in IN_EVERY_RUN else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_steps_follow_plain_torch_on_the_definitions(kind):
    found = train(kind, {})
    assert all(norm > 1e-3 and loss > 1e-3 for _, norm, loss in found[0])
    assert_as_expected(kind, *found)


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 400])
def test_steps_are_the_same_in_other_micro_batches(budget):
    assert_as_expected("turn, vtrace", *train("turn, vtrace", {}, budget), budget=budget)


LAYOUTS = {
    "dp2": (2, {}),
    "dp2 plain": (2, {"distributed_optimizer": False}),
    "dp2 overlapped": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "tp2": (2, {"tensor": 2}),
    "tp2 sp": (2, {"tensor": 2, "sequence": True}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "cp2 short whole": (2, {"context": 2, "context_min_tokens": 18}),
    "recomputed": (2, {"recompute": "full"}),
}


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_the_policy_is_one_of_the_critic(worlds, name):
    ranks, layout = LAYOUTS[name]
    answers = worlds.run(ranks, train, "turn, vtrace", layout)
    assert_as_expected("turn, vtrace", answers[0][0], answers[0][1], answers[0][2])
    assert all(answer[0] == answers[0][0] for answer in answers)


def train_alone(layout: dict[str, object], changes: dict[str, object]) -> list[list[float]]:
    """Losses, norms and values of a critic that begins as a policy, on a rank of the world."""
    divide_world(ParallelConfig(**layout))
    policy = tiny_model(**changes)
    config = CriticConfig(train="always", optimizer=CRITIC_OPTIMIZER)
    source = CriticSource(config=config, hf_config=policy.config, state=hf_state(policy))
    trainer = trainer_with(source, layout, policy)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    updates = [trainer.critic.train_step(pack(learned(n)[rank::ranks], 40), config) for n in range(3)]
    batches = pack(random_samples(LENGTHS), 40)
    values = [v[b.loss_mask].tolist() for v, b in zip(trainer.critic.values(batches), batches, strict=True)]
    return [[u.loss for u in updates], [u.grad_norm for u in updates], *values]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"pipeline": 2, "virtual_pipeline": 2}, {"num_hidden_layers": 4, "tied": True}),
        ({"expert": 2}, {"family": "qwen3_moe"}),
        pytest.param({"context": 2}, {"family": "qwen3_next"}, marks=pytest.mark.nightly),
        ({"tensor": 2, "sequence": True, "expert_tensor": 2}, {"family": "qwen3_moe"}),
    ],
    ids=str,
)
def test_pieces_of_a_pipeline_and_experts_are_divided_as_the_policys(worlds, layout, changes):
    answers = worlds.run(2, train_alone, layout, changes)
    for found, expected in zip(answers[0], train_alone({}, changes), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=2e-5)


def test_in_the_first_steps_the_critic_trains_alone():
    config = CriticConfig(warmup_steps=1, optimizer=CRITIC_OPTIMIZER)
    learner = LearnerConfig(advantage=GAEAdvantage(), critic=config)
    trainer = trainer_with(source_of(tiny_critic(), config))
    before, of_critic = trainer.export(), critic_weights(trainer)
    groups = groups_of("", 0)
    _, result = train_on(trainer, groups, [1.0] * 3, learner, step=1, policy_version=0)
    assert (result.loss, result.grad_norm, result.skipped) == (0.0, 0.0, False)
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.export().items())
    assert any(not torch.equal(weight, of_critic[name]) for name, weight in critic_weights(trainer).items())
    assert trainer.optimizer_config.lr == OPTIMIZER.lr
    _, result = train_on(trainer, groups, [1.0] * 3, learner, step=2, policy_version=1)
    assert result.grad_norm > 0
    assert any(not torch.equal(weight, before[name]) for name, weight in trainer.export().items())


def test_an_objective_with_a_critic_is_refused_by_a_backend_without_one():
    policy = tiny_model()
    trainer = Trainer(policy.config, hf_state(policy), OPTIMIZER)
    learner = LearnerConfig(advantage=GAEAdvantage())
    with pytest.raises(ConfigError, match="has trained without one"):
        train_on(trainer, groups_of("", 0), [1.0] * 3, learner, step=1, policy_version=0)


def test_any_accepted_log_probs_leave_a_step_finite():
    """R28: ratios of whole turns of 1e4 nats a token, both ways."""
    config = CriticConfig(level="turn", targets="vtrace", rho_bar=1e6, optimizer=CRITIC_OPTIMIZER)
    learner = LearnerConfig(advantage=GAEAdvantage(), critic=config)
    trainer = trainer_with(source_of(tiny_critic(), config))
    groups = groups_of("", 0)
    for n, trajectory in enumerate(t for group in groups for t in group):
        trajectory.behaviour_logprobs[trajectory.loss_mask] = (-1e4, 1e-2, -5.0)[n % 3]
    _, result = train_on(trainer, groups, [1.0] * 3, learner, step=1, policy_version=0)
    assert all(np.isfinite(v) for v in (result.loss, result.grad_norm, *result.critic.values()))
    assert result.critic["skipped_updates"] == 0
