"""A short run whose policy calls a tool, from its preset to what is stored."""

import json
import subprocess
import sys

import pytest

from tests.e2e.commands import ENVIRONMENT, Command, wait_for_step


@pytest.mark.nats
@pytest.mark.nightly
@pytest.mark.parametrize(("preset", "tag"), [("product", "<calc>"), ("search", "<search>"), ("mcp", "<")])
def test_a_run_with_tools_trains_on_chats_of_several_turns(tmp_path, preset, tag):
    run = Command(
        tmp_path, "local", "--preset", preset, "--directory", str(tmp_path),
        "--warmup.steps", "150", "--learner.steps", "500", "--admission.groups-per-step", "4",
        "--admission.samples-per-prompt", "4", "--learner.target-accuracy", "1.0",
    )  # fmt: skip
    try:
        wait_for_step(run, tmp_path / preset, 3, timeout_s=240)
        shown = [trajectory for trajectory in tail(tmp_path, preset) if trajectory["metadata"]["tool_calls"]]
    finally:
        run.kill()
    assert shown
    for trajectory in shown:
        by = [part["by"] for part in trajectory["parts"]]
        assert by[:4] == ["context", "policy", "context", "policy"]
        call, result = trajectory["parts"][1]["text"], trajectory["parts"][2]
        assert tag in call
        assert "<result>" in result["text"]
        assert result["masked_tokens"] == 0


def tail(directory, run):
    command = [sys.executable, "-m", "launch", "tail", "--run", run, "--directory", str(directory)]
    told = subprocess.run(
        [*command, "--n", "64", "--once", "--json"],
        capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=directory, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in told.stdout.splitlines()]
