"""A child process does not outlive its parent, however it is started."""

import signal
import subprocess
import sys

import pytest

from bus.process import child_process
from bus.process.child_process import tied_to_parent

PARENT = """
import subprocess, sys, time
from bus.process import child_process
if sys.argv[1] == "without setpriv":
    child_process._setpriv = lambda: None
program = "import time; print('up', flush=True); time.sleep(600)"
tied = child_process.tied_to_parent([sys.executable, "-c", program])
subprocess.Popen(tied.command, preexec_fn=tied.preexec_fn)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is Linux's")
@pytest.mark.parametrize("way", ["setpriv", "without setpriv"])
def test_a_child_dies_with_its_parent(way: str):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, way], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    parent.kill()
    assert parent.communicate(timeout=30) == ("", None)  # the child had its end of the pipe, too


def test_a_program_that_is_not_there_is_said_as_without_a_parent():
    tied = tied_to_parent(["no-such-program", "-v"], signal.SIGKILL)
    assert tied == (("no-such-program", "-v"), None)


def test_a_program_is_looked_for_where_the_child_would(tmp_path):
    (program := tmp_path / "there").write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert tied_to_parent(["there"]).command == ("there",)
    found = tied_to_parent(["there"], path=str(tmp_path))
    assert (found.command, found.preexec_fn) != (("there",), None)


def test_an_older_setpriv_is_not_used(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (older := tmp_path / "setpriv").write_text("#!/bin/sh\necho unrecognized option >&2\nexit 1\n")
    older.chmod(0o755)
    monkeypatch.setattr(child_process.shutil, "which", lambda *_, **__: str(older))
    assert child_process._setpriv.__wrapped__() is None


def test_a_setpriv_that_cannot_run_here_is_not_used(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (broken := tmp_path / "setpriv").write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    monkeypatch.setattr(child_process.shutil, "which", lambda *_, **__: str(broken))
    assert child_process._setpriv.__wrapped__() is None
