"""Sandboxes of E2B, Modal and Daytona: their packages, each in its own environment, ask servers of tests."""

import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from launch.external_environments.environment import VirtualEnvironment

REPOSITORY = Path(__file__).parents[3]
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["e2b", "modal", "daytona"])
def test_the_package_of_a_service_does_what_a_near_sandbox_does(name, tmp_path):
    environment = VirtualEnvironment(tmp_path, tuple(EXTRAS[name]))
    environment.make()
    [site] = tmp_path.glob("venv/lib/python*/site-packages")
    (site / "sluice.pth").write_text(f"{REPOSITORY}\n{sysconfig.get_path('purelib')}\n")  # after its own
    script = Path(__file__).parent / "services" / "ask_service.py"
    ran = subprocess.run(
        [environment.python, script, name],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.stdout.splitlines()[-1:] == [f"asked {name}"], ran.stdout + ran.stderr
