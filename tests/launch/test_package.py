"""The package that users install has what it needs, and works outside of a checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CHECKOUT = Path(__file__).parents[2]
PACKAGES = ("actors", "bus", "launch", "learner", "storage")
BUILD = "from setuptools import build_meta; print(build_meta.build_{kind}({to!r}))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the source distribution."""
    source, to = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in (*PACKAGES, "docs", "tests"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "Makefile", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    for kind in ("wheel", "sdist"):
        build = (sys.executable, "-c", BUILD.format(kind=kind, to=str(to)))
        subprocess.run(build, cwd=source, check=True, capture_output=True)
    return to


def test_the_wheel_has_what_processes_read_and_neither_tests_nor_docs(built: Path):
    [wheel] = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        *(f"{package}/py.typed" for package in PACKAGES),
        "actors/engines/sglang/cpu/requirements.txt",
        "actors/engines/sglang/cpu/sgl_kernel/__init__.py",
        "launch/presets/sorting_agents.py",
        "launch/presets/sort.toml",
        "launch/recipes/sums.toml",
        "launch/dashboard/web/index.html",
        "launch/dashboard/web/vendor/uPlot.LICENSE",
    } <= names
    assert {name.split("/")[0] for name in names} == {*PACKAGES, "sluice_rl-0.1.0.dist-info"}


def test_the_source_distribution_has_tests_and_docs(built: Path):
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"Makefile", "docs/architecture.md", "tests/conftest.py", "tests/soak/clock.c"} <= names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--help",), 0, "Look at a run"),
        (("local", "--preset", "sort", "--print-config"), 0, 'run = "sort"'),
        (("init", "-", "--preset", "panel"), 0, 'run = "panel"'),
        (("bench", "bus"), 2, "'launch bench' is not installed: run it in a checkout of Sluice"),
    ],
)
def test_what_is_installed_works_without_the_checkout(
    built: Path, tmp_path: Path, arguments: tuple[str, ...], status: int, said: str
):
    [wheel] = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    command = (sys.executable, "-P", "-m", "launch", *arguments)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == status
    assert said in ended.stdout + ended.stderr
