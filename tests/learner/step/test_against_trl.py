"""SFT, DPO and reward models step by step beside TRL, on a published model and equal rows in equal order."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import save_file

from launch.recipes.recipe import recipe
from learner.config.batch import BatchConfig
from learner.config.model import ModelConfig
from learner.config.process_settings import LearnerSettings
from learner.config.warmup import WarmupConfig
from learner.data.packing import Sample
from learner.initial.initial import Initial, prepare
from learner.model_directories.model_directory import load_tokenizer
from learner.progress.progress import Progress
from learner.run.restore import restore_backend
from learner.step.warmup import warm_up_step
from tests.actors.gateway.prepared_environments import prepared
from tests.learner.run.stage_settings import settings_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
PACKAGES = ("torch==2.13.0", "trl==1.16.0")
STEPS, SIZE = 20, 8
PAIRS = [
    {"prompt": f"What is {a} plus {b}?", "chosen": f"{a} + {b} = {a + b}.", "rejected": f"It is {a + b + 1}."}
    for a in range(3, 19)
    for b in range(10)
]


RATES = {"sft": 2e-5, "dpo": 5e-6, "reward_model": 2e-5}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("SLUICE_TEST_TRL")
    return prepared(Path(kept) if kept else tmp_path_factory.mktemp("trl") / "environment", PACKAGES)


@pytest.fixture(scope="module")
def model() -> Path:
    found = recipe("sums")
    found.prepare()
    return found.directory / "model"


def settings_of_kind(directory: Path, model: Path, kind: str, backend: str) -> LearnerSettings:
    rows = PAIRS if kind != "sft" else [{"prompt": p["prompt"], "response": p["chosen"]} for p in PAIRS]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    warmup = WarmupConfig.model_validate({
        "steps": STEPS, "batch_size": SIZE, "loss": {"type": kind},
        "demonstrations": directory / "rows.jsonl", "optimizer": {"lr": RATES[kind], "warmup_steps": 0},
    })  # fmt: skip
    found = settings_of(directory, backend=backend, batch=BatchConfig(tokens_per_micro_batch=512))
    own = ModelConfig(path=str(model), dtype="float32")
    return replace(found, warmup=warmup, model=own, model_directory=model)


def rows_of(model: Path, kind: str, samples: list[Sample]) -> list[dict[str, str]]:
    """Return what is read and what is trained of samples, as texts that become the same tokens again."""
    tokenizer, texts = load_tokenizer(model), []
    for sample in samples:
        begin = int(sample.loss_mask.argmax())
        texts.append(tuple(map(tokenizer.decode, (sample.token_ids[:begin], sample.token_ids[begin:]))))
    if kind == "sft":
        return [{"prompt": prompt, "completion": answer} for prompt, answer in texts]
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for (prompt, chosen), (_, rejected) in zip(texts[::2], texts[1::2], strict=True)
    ]


@pytest.fixture(scope="module")
def of_trl(
    python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[float]]:
    """Return a function from a kind to TRL's losses, which computes them once."""

    @cache
    def losses(kind: str) -> list[float]:
        directory = tmp_path_factory.mktemp(kind)
        own = settings_of_kind(directory, model, kind, "fsdp")
        initial = prepare(own, own.warmup.demonstrations)
        samples = [sample for step in range(STEPS) for sample in initial.demonstrations.step(step, SIZE)]
        asked, out = directory / "asked.json", directory / "losses.json"
        begun = begin_of(directory, model, initial) if kind == "reward_model" else model
        given = {"kind": kind, "model": str(begun), "batch_size": SIZE, "lr": RATES[kind], "out": str(out)}
        asked.write_text(json.dumps(given | {"rows": rows_of(model, kind, samples)}))
        command = [python, Path(__file__).with_name("trl_losses.py"), asked]
        subprocess.run(command, check=True, timeout=1800, cwd=directory, env={**os.environ, "PYTHONPATH": ""})
        found: list[float] = json.loads(out.read_text())
        return found

    return losses


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("kind", RATES)
def test_the_losses_of_20_steps_are_those_of_trl(
    tmp_path: Path, of_trl: Callable[[str], list[float]], model: Path, kind: str, backend: str
):
    own = settings_of_kind(tmp_path, model, kind, backend)
    initial = prepare(own, own.warmup.demonstrations)
    trained = restore_backend(own, initial, None, Progress(), own.learner.parallel)
    losses = [warm_up_step(trained, own, initial.demonstrations, step).loss for step in range(STEPS)]
    assert losses == pytest.approx(of_trl(kind), rel=0, abs=1e-5)


def begin_of(directory: Path, model: Path, initial: Initial) -> Path:
    """Write the model with the head that it begins with, and return where."""
    begun = directory / "begun"
    initial.hf_config.save_pretrained(begun)
    load_tokenizer(model).save_pretrained(begun)
    weights = {name: initial.state[name].float().contiguous() for name in initial.state}
    save_file(weights, begun / "model.safetensors", metadata={"format": "pt"})
    return begun
