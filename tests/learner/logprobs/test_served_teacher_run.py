"""Whole runs with a teacher behind a server: the learner, its shadow and a retraining ask it."""

import asyncio
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bus.errors import ConfigError, EngineError
from learner.config.frozen_policies import TeacherConfig
from learner.config.learner import LearnerConfig
from learner.history.retrain import retrain_steps
from learner.initial.initial import prepare
from learner.initial.scratch_model import character_tokenizer
from learner.model_directories.model_directory import save_hf_directory
from storage.store.replay import ReplayStore
from tests.learner.logprobs.served_model import ServedModel
from tests.learner.mini_run import LEARNER, MiniRun, mini_run
from tests.storage.serving import SHARDS

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.usefixtures("in_process")]
STEPS = 4


def other_model(run: MiniRun, directory: Path) -> PreTrainedModel:
    """A model like the run's in a directory, with weights of its own."""
    settings = run.settings()
    prepare(settings, run.demonstrations)
    config = AutoConfig.from_pretrained(settings.model_directory)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    save_hf_directory(directory, config, model.state_dict(), settings.model_directory)
    return model


def retrained(
    run: MiniRun, changed: LearnerConfig, *, own: dict[str, TeacherConfig] | None = None, from_step: int = 0
) -> list[float]:
    with ExitStack() as stack:
        stores = [
            stack.enter_context(closing(ReplayStore.open(run.directory / str(n), writable=False)))
            for n in range(SHARDS)
        ]
        settings = run.settings(**(own or {}))
        initial = prepare(settings, run.demonstrations)
        steps = retrain_steps(settings, initial, stores, from_step=from_step, to_step=STEPS, changed=changed)
        return [step.loss for step in steps]


async def test_a_run_asks_its_teacher_and_trains_as_with_the_teachers_directory(bus, tmp_path):
    async with mini_run(bus, tmp_path) as run:
        model = await asyncio.to_thread(other_model, run, tmp_path / "teacher")
        with ServedModel(model, character_tokenizer()) as server:
            served = {"teacher": TeacherConfig(url=server.url, coef=0.5)}
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run.follow(asyncio.Event(), **served))
                await run.train(**served)
            again = await asyncio.to_thread(retrained, run, LEARNER.model_copy(update=served))
        losses = [run.steps()[n].loss for n in range(1, STEPS + 1)]
        assert [run.shadow_steps()[n].loss for n in range(1, STEPS + 1)] == pytest.approx(losses, abs=1e-6)
        assert again == pytest.approx(losses, abs=1e-6)
        held = {"teacher": TeacherConfig(path=tmp_path / "teacher", coef=0.5)}
        for changed, same in ((held, True), ({}, False)):
            found = await asyncio.to_thread(retrained, run, LEARNER.model_copy(update=changed))
            assert (found == pytest.approx(losses, abs=1e-5)) == same
        away = TeacherConfig(url="http://127.0.0.1:9", outage_s=0.05)
        with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/model_info"):  # it trains what is silent
            await asyncio.to_thread(retrained, run, LEARNER, own={"teacher": away}, from_step=3)
        trained = sum(not body["return_text_in_logprobs"] for body in server.bodies)
        assert trained == 3 * STEPS * 2 * 3  # learner, shadow, again; 2 groups of 3


async def test_a_learner_does_not_start_with_a_teacher_of_another_vocabulary(bus, tmp_path):
    async with mini_run(bus, tmp_path) as run:
        model = await asyncio.to_thread(other_model, run, tmp_path / "teacher")
        model.resize_token_embeddings(30)
        with (
            ServedModel(model, character_tokenizer()) as server,
            pytest.raises(ConfigError, match=r"refuses ids of the policy.*vocab size \(30\)"),
        ):
            await run.train(teacher=TeacherConfig(url=server.url))
    assert run.steps() == {}
