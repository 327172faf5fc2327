"""A run's reference: where it comes from, and that resume, replay and shadow have the same."""

import asyncio
import json
import shutil
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bus.errors import ConfigError
from learner.backends.factory import build_backend
from learner.backends.megatron.trainer import Trainer
from learner.backends.quantised.rounding import Rounding
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.batch import BatchConfig
from learner.config.frozen_policies import ReferenceConfig, TeacherConfig
from learner.config.learner import LearnerConfig
from learner.config.loss import PPOClipLoss
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.config.warmup import WarmupConfig
from learner.data.packing import pack
from learner.history.retrain import retrain_steps
from learner.initial.initial import prepare
from learner.logprobs.frozen_policies import hold_frozen_policies
from learner.model_directories.model_directory import save_hf_directory
from storage.disk.checkpoints import latest as latest_checkpoint
from storage.store.replay import ReplayStore
from storage.weights.quantisation import FORMATS
from tests.learner.division import divide_world
from tests.learner.mini_run import LEARNER, MiniRun, mini_run
from tests.learner.tiny import hf_state, random_samples, tiny_model
from tests.storage.serving import SHARDS

KL = {"reference": ReferenceConfig(kl_coef=0.5)}
REFRESHED = {"reference": ReferenceConfig(kl_coef=0.5, refresh_every=2)}
DECOUPLED = REFRESHED | {
    "loss": PPOClipLoss(centre="proximal"),
    "batch": BatchConfig(tokens_per_micro_batch=32, logprob_tokens_per_micro_batch=100, updates=2),
}


def retrained(run: MiniRun, from_step: int, to_step: int, settings: dict, **options):
    told = run.settings(**settings)
    with ExitStack() as stack:
        stores = [
            stack.enter_context(closing(ReplayStore.open(run.directory / str(n), writable=False)))
            for n in range(SHARDS)
        ]
        initial = prepare(told, run.demonstrations)
        return list(retrain_steps(told, initial, stores, from_step=from_step, to_step=to_step, **options))


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("settings", [KL, REFRESHED, DECOUPLED], ids=["kept", "refreshed", "decoupled"])
async def test_a_resumed_run_has_the_reference_of_one_that_was_not_killed(bus, tmp_path, settings):
    async with mini_run(bus, tmp_path) as run:
        await run.train_and_die(3, **settings)
        await run.train(steps=6, **settings)
        losses = [run.steps()[n].loss for n in range(1, 7)]
        whole = await asyncio.to_thread(retrained, run, 0, 6, settings)
        assert [step.loss for step in whole] == losses  # bit for bit
        assert not any(step.differs for step in whole)
        late = await asyncio.to_thread(retrained, run, 5, 6, settings)
        assert not late[0].differs
        other = await asyncio.to_thread(retrained, run, 0, 6, settings, changed=LEARNER)
        assert other[5].loss_diff > 1e-6  # without the reference it would be another run


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
async def test_a_shadow_with_the_learners_objective_takes_its_steps(bus, tmp_path):
    async with mini_run(bus, tmp_path) as run:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run.follow(asyncio.Event(), **REFRESHED))
            await run.train(**REFRESHED)
        ours, theirs = run.steps(), run.shadow_steps()
        assert [theirs[n].loss for n in range(1, 5)] == [ours[n].loss for n in range(1, 5)]


@pytest.mark.nightly
@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
async def test_what_if_there_had_been_a_reference(bus, tmp_path):
    async with mini_run(bus, tmp_path) as run:
        await run.train()
        changed = LEARNER.model_copy(update=KL)
        [first, *_] = await asyncio.to_thread(retrained, run, 0, 2, {}, changed=changed)
        assert first.batch_equal
        with pytest.raises(ConfigError, match=r"step 2 was trained without one.*--learner.reference.path"):
            await asyncio.to_thread(retrained, run, 2, 3, {}, changed=changed)
        elsewhere = {"reference": ReferenceConfig(kl_coef=0.5, path=tmp_path / "model")}
        [third] = await asyncio.to_thread(
            retrained, run, 2, 3, {}, changed=changed.model_copy(update=elsewhere)
        )
        assert third.loss_diff > 0


LAYOUTS = {
    "one rank": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "pp2 vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "dp2": (2, {}),
    "ep2": (2, {"expert": 2}),
}
DENSE = {"num_hidden_layers": 4, "vocab_size": 59}


def keep(layout: dict, changes: dict, root: Path) -> None:
    """A checkpoint of one policy with another that was held; on a rank of a world."""
    policy, held = (tiny_model(**changes, seed=seed) for seed in (0, 1))
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    trainer = Trainer(policy.config, hf_state(held), OptimizerConfig(), parallel=parallel)
    trainer.frozen.hold("reference")
    trainer.frozen.load("teacher", policy.config, hf_state(policy), Path("elsewhere"))
    save_checkpoint(trainer, root, 1, {}, keep=1)


def kept(layout: dict, changes: dict, root: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """The reference as the checkpoint gives it back, and whether it brought a teacher."""
    policy = tiny_model(**changes, seed=2)
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    trainer = Trainer(policy.config, hf_state(policy), OptimizerConfig(), parallel=parallel)
    load_checkpoint(trainer, latest_checkpoint(root))
    with trainer.frozen.in_place("reference"):
        return trainer.export(), "teacher" in trainer.frozen


def on_ranks(worlds, layout: tuple[int, dict], work, *args):
    """Return what rank 0 returns; one rank is this process."""
    ranks, parallel = layout
    return work(parallel, *args) if ranks == 1 else worlds.run(ranks, work, parallel, *args)[0]


@pytest.mark.slow
@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        pytest.param(before, after, changes, marks=pytest.mark.slow if before != after else ())
        for before, after, changes in [
            ("one rank", "one rank", DENSE),
            ("tp2", "pp2", DENSE | {"tied": True}),
            ("pp2", "tp2", DENSE),
            ("pp2 vpp2", "cp2", DENSE | {"tied": True}),
            ("dp2", "pp2 vpp2", DENSE),
            ("cp2", "one rank", DENSE),
            ("ep2", "one rank", {"family": "qwen3_moe"}),
            ("one rank", "ep2", {"family": "qwen3_moe"}),
        ]
    ],
)
def test_a_checkpoint_keeps_a_policy_that_was_held_for_any_layout(worlds, tmp_path, before, after, changes):
    on_ranks(worlds, LAYOUTS[before], keep, changes, tmp_path)
    found, has_teacher = on_ranks(worlds, LAYOUTS[after], kept, changes, tmp_path)
    expected = hf_state(tiny_model(**changes, seed=1))
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    assert found.keys() == expected.keys() - ({"lm_head.weight"} if changes.get("tied") else set())
    assert not has_teacher  # its directory has it


def trainer_and_settings(tmp_path, **learner):
    run = MiniRun(None, tmp_path, None, tmp_path / "none")  # of which only the settings are asked for
    settings = run.settings(**learner)
    initial = prepare(replace(settings, warmup=WarmupConfig(steps=0)), None)
    trainer = build_backend(
        settings.model, initial.hf_config, initial.state, settings.learner.optimizer, ParallelConfig()
    )
    return trainer, settings


def test_without_a_warm_up_the_initial_model_is_the_reference_and_needs_no_place_in_checkpoints(tmp_path):
    trainer, settings = trainer_and_settings(tmp_path, **KL)
    settings = replace(settings, warmup=WarmupConfig(steps=0))
    initial = trainer.export()
    for parameter in trainer.model.parameters():
        parameter.data += 1.0
    hold_frozen_policies(trainer, settings, settings.learner, stage="rl", step=7)
    with trainer.frozen.in_place("reference"):
        assert all(torch.equal(initial[name], weight) for name, weight in trainer.export().items())
    assert trainer.frozen.own == set()


def test_the_initial_model_is_rounded_like_the_policy_and_one_of_a_named_directory_is_not(tmp_path):
    trainer, settings = trainer_and_settings(tmp_path, **KL)
    trainer.compute_with(Rounding(FORMATS["fp8_block"], torch.float32))
    settings = replace(settings, warmup=WarmupConfig(steps=0))
    batches = pack(random_samples([5, 9, 20]), 40)
    rounded = trainer.logprobs(batches)[0].nan_to_num()
    named = ReferenceConfig(kl_coef=0.5, path=shutil.copytree(settings.model_directory, tmp_path / "named"))
    for reference, same in ((KL["reference"], True), (named, False), (KL["reference"], True)):
        hold_frozen_policies(trainer, settings, LearnerConfig(reference=reference), stage="rl", step=0)
        with trainer.frozen.in_place("reference"):
            found = trainer.logprobs(batches)[0].nan_to_num()
        assert torch.equal(found, rounded) == same


def test_after_a_warm_up_the_reference_waits_for_its_end(tmp_path):
    trainer, settings = trainer_and_settings(tmp_path, **KL)
    hold_frozen_policies(trainer, settings, settings.learner, stage="warmup", step=0)
    assert "reference" not in trainer.frozen
    hold_frozen_policies(trainer, settings, settings.learner, stage="rl", step=0)
    assert trainer.frozen.own == {"reference"}


def test_without_the_directory_that_was_named_before_the_reference_is_the_initial_model_again(tmp_path):
    trainer, settings = trainer_and_settings(tmp_path, **KL)
    named = ReferenceConfig(kl_coef=0.5, path=other_model(tmp_path / "named", settings))
    hold_frozen_policies(trainer, settings, LearnerConfig(reference=named), stage="rl", step=7)
    with pytest.raises(ConfigError, match=r"the policy after the warm-up is gone"):
        hold_frozen_policies(trainer, settings, settings.learner, stage="rl", step=7)
    settings = replace(settings, warmup=WarmupConfig(steps=0))
    hold_frozen_policies(trainer, settings, settings.learner, stage="rl", step=7)
    assert trainer.frozen.sources == {"reference": settings.model_directory}
    hold_frozen_policies(trainer, settings, settings.learner, stage="rl", step=8)
    assert trainer.frozen.sources == {"reference": settings.model_directory}


def test_what_the_objective_does_not_want_is_not_kept(tmp_path):
    trainer, settings = trainer_and_settings(tmp_path)
    trainer.frozen.hold("reference")  # as a checkpoint of another objective brings it
    hold_frozen_policies(trainer, settings, settings.learner, stage="rl", step=7)
    assert "reference" not in trainer.frozen


def other_model(directory: Path, settings, **changes) -> Path:
    """A model directory like the run's, but for `changes` of its configuration."""
    config = AutoConfig.from_pretrained(settings.model_directory)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    save_hf_directory(directory, config, model.state_dict(), settings.model_directory)
    return directory


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("tag", ["reference", "teacher", "teacher.other"])
def test_a_directory_gives_the_policy_and_one_of_another_model_is_refused(tmp_path, tag):
    trainer, settings = trainer_and_settings(tmp_path)
    fine = other_model(tmp_path / "fine", settings)
    wide = other_model(tmp_path / "wide", settings, vocab_size=trainer.hf_config.vocab_size + 1)
    permuted = other_model(tmp_path / "permuted", settings)
    tokenizer = permuted / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    names = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"]["vocab"] |= {names[-1]: len(names) - 2, names[-2]: len(names) - 1}
    tokenizer.write_text(json.dumps(content))

    def learner(path: Path) -> LearnerConfig:
        if tag == "teacher":
            return LearnerConfig(teacher=TeacherConfig(path=path))
        if tag == "teacher.other":
            return LearnerConfig(teachers={"other": TeacherConfig(path=path)})
        return LearnerConfig(reference=ReferenceConfig(kl_coef=1.0, path=path))

    before = trainer.export()
    for directory, complaint in (
        (wide, rf"the {tag} in .*wide .*vocab is \d+, not \d+: choose a model like the policy"),
        (permuted, rf"the {tag} in .*permuted has another vocabulary .* 2 tokens have other ids"),
        (tmp_path / "nothing", "is not a model directory"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            hold_frozen_policies(trainer, settings, learner(directory), stage="warmup", step=0)
    assert tag not in trainer.frozen
    hold_frozen_policies(trainer, settings, learner(fine), stage="warmup", step=0)
    expected = AutoModelForCausalLM.from_pretrained(fine).state_dict()
    with trainer.frozen.in_place(tag):
        assert all(torch.equal(expected[name], weight) for name, weight in trainer.export().items())
    assert all(torch.equal(before[name], weight) for name, weight in trainer.export().items())


def test_a_directory_named_on_resume_takes_the_place_of_what_the_checkpoint_kept(tmp_path):
    trainer, settings = trainer_and_settings(tmp_path)
    trainer.frozen.hold("reference")
    named = ReferenceConfig(kl_coef=1.0, path=other_model(tmp_path / "named", settings))
    refreshed = named.model_copy(update={"refresh_every": 10})
    held = {}
    for reference in (refreshed, named):
        learner = LearnerConfig(reference=reference)
        hold_frozen_policies(trainer, settings, learner, stage="rl", step=20)
        held[reference] = "reference" in trainer.frozen.own
    assert held == {refreshed: True, named: False}
    another = other_model(tmp_path / "another", settings)
    learner = LearnerConfig(reference=ReferenceConfig(kl_coef=1.0, path=another))
    hold_frozen_policies(trainer, settings, learner, stage="rl", step=20)
    assert trainer.frozen.sources == {"reference": another}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"path": "x"}, r"reference.path=x needs reference.kl_coef above 0"),
        ({"refresh_every": 5}, r"reference.refresh_every=5 needs reference.kl_coef above 0"),
        ({"kl_coef": 1, "kl_in": "advantage", "kl_unbiased": True}, "needs reference.kl_in=loss"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        ReferenceConfig(**settings)
