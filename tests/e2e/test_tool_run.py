"""A short run whose policy calls a tool: from its preset to what is stored."""

import json
import re

import pytest

from tests.e2e.commands import Command


@pytest.mark.nats
@pytest.mark.slow
def test_a_run_with_tools_trains_on_chats_of_several_turns(tmp_path):
    run = Command(
        tmp_path, "local", "--preset", "product", "--directory", str(tmp_path / "run"),
        "--warmup.steps", "120", "--learner.steps", "3", "--admission.groups-per-step", "4",
        "--admission.samples-per-prompt", "4", "--learner.target-accuracy", "1.0",
    )  # fmt: skip
    assert run.process.wait(240) == 0, run.output.read_text()[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in re.findall(r"rollout/\w+", json.dumps(row))}
    assert {"rollout/turns", "rollout/tool_calls", "rollout/malformed_calls"} <= names
