"""Tests that run in forked workers are reported as in one process, and a worker that dies is a failure."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TREE = Path(__file__).parents[1]
CONFTEST = """
import os, pytest
from pathlib import Path

@pytest.fixture(scope="session")
def server():
    mine = Path(f"server-{os.getpid()}")
    mine.touch()
    yield
    mine.unlink()
"""
FILES = {
    "test_one.py": """
def test_prints(server, capfd):
    print("words")
    assert capfd.readouterr().out == "words\\n"

def test_fails(server, tmp_path):
    print("last", "words")
    assert str(tmp_path) == "elsewhere"
""",
    "test_two.py": """
import os

def test_passes(server):
    pass

def test_dies():
    os._exit(STATUS)

def test_is_lost():
    pass
""",
    "folder/test_three.py": "import pytest\ndef test_skips(server): pytest.skip('no reason')",
}


@pytest.mark.parametrize("status", [3, 0])
def test_what_fails_is_said_and_each_worker_ends_what_it_began(tmp_path: Path, status: int):
    (tmp_path / "folder").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace("STATUS", str(status)))
    command = ("-m", "pytest", "-p", "tests.workers", "-p", "no:cacheprovider", "--workers", "3", "-ra")
    whole = subprocess.run(
        [sys.executable, *command, "-c", "/dev/null", "--rootdir", str(tmp_path), "."],
        cwd=tmp_path,
        env={"PYTHONPATH": str(TREE), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert whole.returncode == 1, whole.stderr
    assert "2 failed, 2 passed, 1 skipped" in whole.stdout, whole.stdout
    for words in (
        "last words",
        "worker-",
        "FAILED test_two.py::test_dies",
        f"exit status {status}",
        "no reason",
    ):
        assert words in whole.stdout, whole.stdout
    assert len(list(tmp_path.glob("server-*"))) == 1, "the worker that died alone leaves its server"
