"""A run whose weights travel over HTTP: from the learner to a relay, and from there to other actors."""

import json
from pathlib import Path

import pytest

from bus.server import free_port
from tests.e2e.commands import SMALL, Command

pytestmark = [pytest.mark.slow, pytest.mark.nats]


def test_actors_follow_the_policy_through_a_relay(tmp_path: Path):
    join = ("--bus", f"nats://127.0.0.1:{free_port('127.0.0.1')}", "--run", "relayed")
    http = ("--learner.publication.transport.type", "http", "--learner.publication.snapshot-every", "2")
    started = [Command(tmp_path / "bus", "bus", "--port", join[1].rsplit(":", 1)[1])]
    try:
        started.append(Command(tmp_path / "storage", "storage", *join, *SMALL, *http))
        near = Command(tmp_path / "near", "actors", *join, "--actors.weights.site", "near")
        far = Command(tmp_path / "far", "actors", *join, "--actors.weights.via", "near")
        learner = Command(tmp_path / "learner", "learner", *join)
        started += [near, far, learner]
        assert learner.wait(240) == 0, learner.said()
        for actors in (near, far):
            assert actors.wait(30) == 0, actors.said()
    finally:
        for command in started:
            command.kill()
    progress = json.loads((tmp_path / "learner/runs/relayed/progress.json").read_text())
    assert progress["step"] == 4
    assert {"0", "1", "5"} <= set(progress["evaluations"])
    assert "relay_ready" in near.said()
    assert "weights_not_fetched" not in near.said() + far.said()
    assert list((tmp_path / "learner/runs/relayed/weights").glob("*.snapshot.*.blob"))
