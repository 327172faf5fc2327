"""A mixture whose routed experts go to shards and learner by HTTP, while parts of its run are killed."""

import json
import os
import random
from pathlib import Path

import pytest

from tests.e2e import commands
from tests.e2e.commands import Command, assert_whole, part, wait_for_step, with_steps
from tests.e2e.small_mixtures import MODELS, SMALL, written

pytestmark = [pytest.mark.nats, pytest.mark.nightly, pytest.mark.timeout(1200)]
STEPS, KILLS = 6, 4
FROM_THE_FIRST_BYTE = "import bus.trajectory\nbus.trajectory.LEAST_APART_BYTES = 1\n"
"""What each process of the run begins with: trajectories of a test have far fewer experts than 512 KiB."""


def test_a_mixture_ends_whole_though_its_parts_are_killed_at_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sitecustomize.py").write_text(FROM_THE_FIRST_BYTE)
    paths = os.pathsep.join((str(tmp_path), commands.ENVIRONMENT["PYTHONPATH"]))
    monkeypatch.setitem(commands.ENVIRONMENT, "PYTHONPATH", paths)
    path, seed = written(MODELS["qwen3_moe"], tmp_path / "model"), random.randrange(1 << 32)
    settings = (*with_steps(SMALL, STEPS), "--model.path", str(path), "--replay.shards", "2")
    settings += ("--learner.read", "bus", "--learner.checkpoint.save-every", "2")
    settings += ("--actors.environment.reward", "random")
    launcher, run, draw = Command(tmp_path, "local", *settings), tmp_path / "runs/sort", random.Random(seed)
    killed = [draw.choice(("actors", "storage", "learner", "bus")) for _ in range(KILLS)]
    try:
        for step, name in enumerate(killed, 1):
            wait_for_step(launcher, run, step, timeout_s=400)
            part(launcher, name).kill()
        assert launcher.wait(500) == 0, (seed, killed, launcher.said())
    finally:
        launcher.kill()
    assert_whole(run, STEPS, 4, 4)
    assert [*run.glob("replay/*/.experts")], "experts went to the shards beside the bus"
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = {each["step"]: each for each in records if each.get("train/stage") == "rl"}
    assert [steps[n]["policy/router_replayed_fraction"] > 0.9 for n in sorted(steps)] == [True] * STEPS
    verified = Command(tmp_path, "verify", "--run", "sort", "--json")
    assert verified.wait(200) == 0, (seed, killed, verified.said())
