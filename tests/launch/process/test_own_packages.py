"""A user's own files may have the names of our packages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bus.errors import ConfigError
from bus.process import plugins
from bus.process.child_process import module_command
from bus.process.plugins import OWN_PACKAGES, load_function
from launch.process.own_packages import CHECKOUT_PACKAGES, PACKAGES

ROOT = Path(__file__).parents[3]
HELP = ("launch", "bench", "bus", "--help")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("actors.py", "bus.py", "storage.py", "learner/__init__.py", "benchmarks.py", "soak.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('a file of the user was imported for ours')\n")
    return tmp_path


def test_both_lists_of_our_packages_name_what_the_repository_has():
    found = {file.parent.name for file in ROOT.glob("*/__init__.py")} - {"tests"}
    assert set(PACKAGES) == set(OWN_PACKAGES) == found
    of_checkout = {file.parents[1].name for file in ROOT.glob("tests/*/commands/__init__.py")}
    assert set(CHECKOUT_PACKAGES) == set(plugins.CHECKOUT_PACKAGES) == of_checkout


def test_no_package_of_a_checkout_imports_a_test():
    """`launch bench` finds these packages alone: `tests` may be a package of the user's."""
    files = [file for name in CHECKOUT_PACKAGES for file in ROOT.glob(f"tests/{name}/**/*.py")]
    assert [
        str(file) for file in files if re.search(r"^\s*(from|import) tests\b", file.read_text(), re.M)
    ] == []
    assert len(files) > 50


@pytest.mark.slow
@pytest.mark.parametrize("first", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "command", [(sys.executable, "-m", *HELP), pytest.param(module_command(*HELP), marks=pytest.mark.nightly)]
)
def test_a_command_runs_beside_files_named_like_our_packages(directory: Path, command, first: bool):
    search = f"{directory}{os.pathsep}{ROOT}" if first else str(ROOT)
    done = subprocess.run(
        command, cwd=directory, env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: launch bench bus" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("search", [".", pytest.param("", marks=pytest.mark.nightly)])
def test_a_process_that_we_start_is_no_file_of_the_user_named_launch(directory: Path, search: str):
    for name in ("launch.py", "learner.py"):
        (directory / name).write_text("raise RuntimeError('a file of the user was run for ours')\n")
    environment = os.environ | {"PYTHONPATH": search}
    done = subprocess.run(
        module_command(*HELP), cwd=directory, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: launch bench bus" in done.stdout


@pytest.mark.parametrize("package", ["storage", "soak"])
def test_a_plug_in_named_like_a_package_of_ours_is_to_be_renamed(directory: Path, monkeypatch, package: str):
    monkeypatch.chdir(directory)
    (directory / f"{package}.py").write_text("def reward(answer): return 1.0\n")
    hint = f"{package!r} is a package of Sluice, so '{package}.py' here is not imported: rename it"
    with pytest.raises(ConfigError, match=hint):
        load_function("reward", f"{package}:reward", {})
    with pytest.raises(
        ConfigError, match="'learner' is a package of Sluice, so 'learner' here is not imported"
    ):
        load_function("reward", "learner.mine:reward", {})
