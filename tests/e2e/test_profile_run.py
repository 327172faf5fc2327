"""`launch profile` of a learner of two ranks, as a user asks for it from elsewhere."""

import gzip
import json
from pathlib import Path

import pytest

from bus.server.nats_server import free_port
from tests.e2e.commands import SMALL, Command, wait_until, with_steps

pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(600)]


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_both_ranks_trace_the_next_steps_and_the_command_says_what_took_the_time(
    tmp_path: Path, backend: str
):
    port = free_port("127.0.0.1")
    join = ("--bus", f"nats://127.0.0.1:{port}", "--run", "traced")
    settings = (*with_steps(SMALL, 2000), "--learner.backend", backend)
    started = [Command(tmp_path / "bus", "bus", "--port", str(port))]
    try:
        started.append(Command(tmp_path / "storage", "storage", *join, *settings))
        started.append(Command(tmp_path / "actors", "actors", *join))
        started.append(Command(tmp_path / "learner", "learner", *join, "--nproc", "2"))
        run = tmp_path / "learner/runs/traced"
        wait_until((run / "lineage.jsonl").exists, "the first step", *started, timeout_s=300)
        asking = Command(tmp_path / "asking", "profile", *join, "--steps", "2")
        started.append(asking)
        assert asking.wait(200) == 0, asking.said()
        steps = len((run / "lineage.jsonl").read_text().splitlines())
        wait_until(
            lambda: len((run / "lineage.jsonl").read_text().splitlines()) > steps, "a later step", started[-2]
        )
    finally:
        for command in started:
            command.kill()
    said = asking.said()
    assert said.startswith("2 steps from step ")
    assert "rank 1: the CPU ran no operator of torch in " in said
    [directory] = (run / "profiles").iterdir()
    assert said.endswith(f"written to {directory}\n")
    for rank in (0, 1):
        with gzip.open(directory / f"rank-{rank}.trace.json.gz") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert any("Backward" in name for name in names)
