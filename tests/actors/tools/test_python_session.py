"""The Python session of a sandbox, apart from a sandbox."""

import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from actors.tools import python_session


@pytest.fixture
def run(tmp_path):
    program = shutil.copy(python_session.__file__, tmp_path / "session.py")

    def run(code):
        return subprocess.run(
            [sys.executable, "-S", program], input=code, capture_output=True, text=True, timeout=20, check=False
        )

    yield run
    run("import os; os._exit(0)")


def test_an_interrupt_that_comes_too_late_loses_no_call(run):
    session = int(run("import os\nkept = 1\nos.getpid()").stdout)
    is_over = threading.Event()

    def interrupt():
        while not is_over.wait(0.0002):
            os.kill(session, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        for _ in range(60):
            run("")  # an interrupt may strike the code, but the call ends
    finally:
        is_over.set()
        interrupting.join()
    assert run("kept").stdout == "1\n"
