"""Runs in exact arithmetic: each recorded log-prob is the learner's own at the version that sampled it."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

import launch
from bus.trajectory import Trajectory
from learner.backends.factory import close_world, init_world
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import Sample
from learner.logprobs.logprobs import score
from tests.e2e.commands import Command, assert_whole

# By day test_separate_commands.py has an asynchronous run in exact arithmetic.
pytestmark = [pytest.mark.nats, pytest.mark.nightly]
STEPS, TEMPERATURE = 6, 0.8
SMALL = (
    "--preset", "sort", "--model.numerics", "exact", "--warmup.steps", "10",
    "--warmup.batch-size", "8", "--warmup.threads", "1", "--sampling.temperature", str(TEMPERATURE),
    "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
    "--evaluation.every-versions", "0", "--learner.target-accuracy", "none",
    "--learner.entropy-coef", "0.1",  # so that every step moves the weights, whatever the rewards are
)  # fmt: skip


def run_for(tmp_path: Path, steps: int, *settings: str) -> list[dict]:
    run = Command(tmp_path, "local", *SMALL, "--learner.steps", str(steps), *settings)
    try:
        assert run.wait(240) == 0, run.said()
    finally:
        run.kill()
    lines = (tmp_path / "runs/sort/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_engines_agreed(directory: Path) -> None:
    """Assert that engines scored the probe of versions, with no difference from the learner."""
    lines = (directory / "counters.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines if "engine/probe_nats" in line]
    assert found
    assert {each["engine/probe_nats"] for each in found} == {0.0}


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_synchronous_run_logs_a_mismatch_of_exactly_zero_at_each_step(tmp_path: Path, backend: str):
    records = run_for(tmp_path, STEPS, "--admission.max-staleness", "0", "--learner.backend", backend)
    directory = tmp_path / "runs/sort"
    assert_whole(directory, STEPS, 4, 4)
    steps = [each for each in records if each.get("train/stage") == "rl"]
    assert [each["policy/mismatch_nats"] for each in steps] == [0.0] * STEPS
    assert [each["policy/importance_ratio"] for each in steps] == [1.0] * STEPS
    assert min(each["train/grad_norm"] for each in steps) > 0
    assert_engines_agreed(directory)


def replayed(trajectories: list[Trajectory], model: Path, version: int, snapshot: Path) -> np.ndarray:
    """Differences of the tokens of a version from what the other backend makes of them with its weights."""
    learner = FsdpTrainer(
        AutoConfig.from_pretrained(model), load_file(snapshot), OptimizerConfig(), exact=True
    )
    samples = [
        Sample(
            token_ids=each.token_ids,
            loss_mask=each.loss_mask,
            streams={"temperatures": np.full(len(each.token_ids), TEMPERATURE, np.float32)},
        )
        for each in trajectories
    ]
    found = score(learner, samples, tokens_per_micro_batch=300)
    parts = [np.zeros(0, np.float32)]
    for each, scores in zip(trajectories, found, strict=True):
        own = each.loss_mask & (each.policy_versions == version)
        parts.append(np.abs(scores.logprobs - each.behaviour_logprobs)[own])
    return np.concatenate(parts)


def test_an_asynchronous_run_that_resumed_recorded_what_each_version_says_to_the_bit(tmp_path: Path):
    kept = [
        part for version in range(STEPS + 2) for part in ("--learner.publication.keep-versions", str(version))
    ]
    asynchronous = ("--admission.max-staleness", "2", *kept)
    run_for(tmp_path, STEPS // 2, *asynchronous)
    records = run_for(tmp_path, STEPS, *asynchronous)
    directory = tmp_path / "runs/sort"
    steps = [each for each in records if each.get("train/stage") == "rl"]
    assert max(each["policy/stale_fraction"] for each in steps) > 0
    assert max(each.get("policy/drift_nats", 0.0) for each in steps) > 0, "the weights have moved"
    mismatches = [each["policy/mismatch_nats"] for each in steps if "policy/mismatch_nats" in each]
    assert mismatches
    assert not any(mismatches)
    assert_engines_agreed(directory)
    trajectories = list(launch.attach("sort", directory=tmp_path / "runs").trajectories())
    assert len(trajectories) >= STEPS * 16
    found = {}
    init_world(backend="fsdp")
    try:
        for path in (directory / "kept-versions").iterdir():
            version = int(path.name.removeprefix("version-"))
            found[version] = replayed(trajectories, directory / "model", version, path / "model.safetensors")
    finally:
        close_world()
    assert sum(len(each) for each in found.values()) == sum(
        int(each.loss_mask.sum()) for each in trajectories
    )
    assert sum(len(each) > 0 for each in found.values()) >= 4
    assert {version: float(each.max(initial=0)) for version, each in found.items()} == dict.fromkeys(
        found, 0.0
    )
