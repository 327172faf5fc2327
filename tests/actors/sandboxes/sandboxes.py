"""Sandboxes of tests, also as an ordinary user would start them on a host where the tests run as root."""

import os
import subprocess
import sys
from functools import cache, partial

import pytest

from actors.sandboxes import server_process as actor_side
from bus.process.child_process import module_command

USER = 54321
"""A user without rights."""


def start_as_ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sandboxes start without privileges; skips where no interpreter is readable for everybody."""
    if os.geteuid() != 0:
        return  # they do anyway
    python = _public_interpreter()
    if python is None:
        pytest.skip("no interpreter of Python 3.11 or later that an ordinary user may run")

    def command(module, *arguments):
        return python, *module_command(module, *arguments)[1:]

    monkeypatch.setattr(actor_side, "module_command", command)
    popen = partial(subprocess.Popen, user=USER, group=USER, extra_groups=[])
    monkeypatch.setattr(actor_side.subprocess, "Popen", popen)


@cache
def _public_interpreter() -> str | None:
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        try:
            subprocess.run(
                [python, "-c", check], check=True, user=USER, group=USER, extra_groups=[], cwd="/", env={}
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None
