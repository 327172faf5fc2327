"""The command line, called in the test's own process."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cli import main as cli
from launch.process.runtime import USAGE

Refused = Callable[..., str]


def refusal(status: int | str | None, stderr: str, wanted: int = USAGE) -> str:
    """The one message for the user in `stderr`; the status must say whose mistake it is."""
    assert "Traceback" not in stderr, stderr
    messages = re.findall(r"^launch: (.*(?:\n {8}.*)*)", stderr, re.MULTILINE)
    assert (status, len(messages)) == (wanted, 1), (status, stderr)
    return messages[0]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Call the command line with arguments that it refuses; returns its message. A process takes seconds."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")

    def refused(*arguments: str | Path, wanted: int = USAGE) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments)])
        return refusal(ended.value.code, capsys.readouterr().err, wanted)

    return refused
