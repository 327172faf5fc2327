"""A run from four commands in four working directories that share nothing but the bus."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bus.server import free_port
from learner.backends.factory import close_world, init_world
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import latest_checkpoint, load_checkpoint
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import Sample, pack
from learner.model_directory import load_hf_directory
from tests.e2e.commands import SMALL, Command

pytestmark = [pytest.mark.slow, pytest.mark.nats]
STEPS, GROUPS, SAMPLES = 4, 4, 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """The directories of a run that has ended."""
    root = tmp_path_factory.mktemp("hosts")
    port = free_port("127.0.0.1")
    join = ("--bus", f"nats://127.0.0.1:{port}", "--run", "shared-nothing")
    started = [Command(root / "bus", "bus", "--port", str(port))]
    try:
        started.append(Command(root / "storage", "storage", *join, *SMALL))
        learner = Command(root / "learner", "learner", *join)
        actors = Command(root / "actors", "actors", *join)
        started += [learner, actors]
        assert learner.wait(180) == 0, learner.said()
        assert actors.wait(30) == 0, actors.said()  # they hear that the run is done
        for service in started[1::-1]:
            assert service.stop() == 0, service.said()
        yield root
    finally:
        for command in started:
            command.kill()


def test_each_host_keeps_only_what_is_its_own(finished: Path):
    found = {
        host.name: {p.name for p in (host / "runs/shared-nothing").glob("*")} for host in finished.iterdir()
    }
    assert {"checkpoints", "export", "model", "progress.json"} <= found["learner"]
    assert {"ledger.sqlite", "replay", "data"} <= found["storage"]
    assert found["actors"] == set()
    assert not found["learner"] & {"ledger.sqlite", "replay"}


def test_every_group_is_trained_stored_or_rolling_out(finished: Path):
    progress = json.loads((finished / "learner/runs/shared-nothing/progress.json").read_text())
    ledger = sqlite3.connect(finished / "storage/runs/shared-nothing/ledger.sqlite")
    groups = dict(ledger.execute("SELECT state, count(*) FROM leases GROUP BY state"))
    ledger.close()
    assert progress["step"] == STEPS
    assert progress["trajectories_trained"] == STEPS * GROUPS * SAMPLES
    assert groups.pop("committed") == STEPS * GROUPS
    assert set(groups) <= {"stored", "issued"}
    assert progress["max_staleness_seen"] <= 2


def test_held_out_accuracy_was_measured_for_the_first_the_warm_and_the_last_version(finished: Path):
    progress = json.loads((finished / "learner/runs/shared-nothing/progress.json").read_text())
    assert {"0", "1", str(1 + STEPS)} <= set(progress["evaluations"])


@pytest.fixture
def world() -> Iterator[None]:
    """A world of this one process, unless tests of the learner made one in it before."""
    if torch.distributed.is_initialized():
        yield
        return
    init_world()
    yield
    close_world()


@pytest.mark.usefixtures("world")
def test_export_answers_greedily_as_the_trainer_does(finished: Path):
    run = finished / "learner/runs/shared-nothing"
    model = AutoModelForCausalLM.from_pretrained(run / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    hf_config, initial = load_hf_directory(run / "model")
    trainer = Trainer(hf_config, initial, OptimizerConfig())
    load_checkpoint(trainer, latest_checkpoint(run / "checkpoints"))
    chats = [[{"role": "user", "content": f"sort {n:06d}"}] for n in (918273, 5, 774411)]
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        answer = model.generate(
            torch.tensor([prompt]), max_new_tokens=7, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )[0].tolist()
        assert _greedy(trainer, answer)[len(prompt) - 1 : -1] == answer[len(prompt) :]


def _greedy(trainer: Trainer, tokens: list[int]) -> list[int]:
    """The likeliest next token after each prefix, by the Megatron model."""
    length = len(tokens)
    sample = Sample(
        token_ids=torch.tensor(tokens, dtype=torch.int32).numpy(),
        loss_mask=torch.ones(length, dtype=torch.bool).numpy(),
        streams={},
    )
    [batch] = pack([sample], length)
    with torch.no_grad():
        return trainer.model.logits(batch).argmax(-1).tolist()
