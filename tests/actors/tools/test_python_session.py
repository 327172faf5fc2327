"""The Python session of a sandbox, apart from a sandbox."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest

from actors.tools import python_session


@pytest.fixture
def run(tmp_path):
    words = [sys.executable, "-S", shutil.copy(python_session.__file__, tmp_path / "session.py")]

    def run(code):
        return subprocess.run(words, input=code, capture_output=True, text=True, timeout=20, check=False)

    run.words = words
    yield run
    run("import os; os._exit(0)")


@pytest.mark.slow
def test_an_interrupt_that_comes_too_late_loses_no_call(run):
    session = int(run("import os\nkept = 1\nos.getpid()").stdout)
    is_over = threading.Event()

    def interrupt():
        while not is_over.wait(0.0002):
            os.kill(session, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        for _ in range(25):
            run("")  # an interrupt may strike the code, but the call ends
    finally:
        is_over.set()
        interrupting.join()
    assert run("kept").stdout == "1\n"


def test_code_that_is_stopped_when_nobody_reads_its_output_leaves_the_session(run):
    run("kept = 1")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(run.words, **pipes) as stopped:
        stopped.stdin.write(b"print('begun', flush=True)\nprint('old')\nwhile True: pass")
        stopped.stdin.close()
        assert stopped.stdout.readline() == b"begun\n"
        stopped.stdout.close()
        stopped.stderr.close()
        stopped.kill()
    ran = run("kept")
    assert (ran.stdout, ran.stderr) == ("1\n", "")


def test_a_run_that_is_ended_before_it_sends_anything_leaves_the_session(run, tmp_path):
    run("kept = 1")
    with socket.socket(socket.AF_UNIX) as left:
        left.connect(str(tmp_path / "session"))
    assert run("kept").stdout == "1\n"
