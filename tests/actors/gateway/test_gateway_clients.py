"""The openai and anthropic packages as they are, in an environment of their own, as theirs exclude ours."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.actors.gateway.request_bodies import WRITTEN, answering
from tests.actors.gateway.served import encoded, served

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(600)]
CLIENT = Path(__file__).with_name("real_clients.py")


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the packages; SLUICE_TEST_CLIENTS names one that is there already."""
    if ready := os.environ.get("SLUICE_TEST_CLIENTS"):
        return Path(ready)
    directory = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=120)
    packages = ["openai>=2,<4", "anthropic>=0.70,<3"]
    subprocess.run([directory / "bin/pip", "install", "--quiet", *packages], check=True, timeout=400)
    return directory / "bin/python"


async def test_openais_and_anthropics_own_clients_are_served_and_recorded(python: Path):
    async with served(answering) as s:
        variables = {
            "PATH": os.environ["PATH"],
            "OPENAI_BASE_URL": f"{s.url}/v1",
            "OPENAI_API_KEY": s.session.key,
            "ANTHROPIC_BASE_URL": s.url,
            "ANTHROPIC_API_KEY": s.session.key,
        }
        client = await asyncio.create_subprocess_exec(
            python, CLIENT, env=variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await client.communicate()
        assert client.returncode == 0, said.decode()
        recorded = s.policy.trajectories(1.0)
        answers = [
            trajectory.token_ids[turn.start : turn.stop].tolist()
            for trajectory in recorded
            for turn in trajectory.turns
        ]
    end = encoded("<|im_end|>")
    assert answers.count(encoded(f"I add.{WRITTEN}") + end) == 4
    assert answers.count(encoded("42") + end) == 4
    assert len(answers) == 8  # what was counted or refused left nothing
