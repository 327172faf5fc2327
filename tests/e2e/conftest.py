"""The command line, called in the test's own process."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

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
def refused(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refused]:
    """Call the command line with arguments that it refuses; returns its message. A process takes seconds."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    settings = structlog.get_config()

    def refused(*arguments: str | Path, wanted: int = USAGE) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments)])
        return refusal(ended.value.code, capsys.readouterr().err, wanted)

    yield refused
    structlog.configure(**settings)  # the command line logs in its own way
