"""Tests how work is shown: as a bar on a terminal, as lines of a log elsewhere, and not at all if short."""

import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from bus.process import work_progress
from bus.process.work_progress import long_work, tracked

PROGRAM = """
import threading, sys
from bus.process import work_progress
from launch.process.log_settings import configure_logging
work_progress.SHOWN_AFTER_S = work_progress.LINE_S = 0.05
configure_logging("info", sys.argv[1])
looks = threading.Semaphore(0)
with work_progress.long_work("loading the weights", 4, measured=lambda: looks.release() or 1):
    for _ in range(3):  # what was seen is shown before the next look
        assert looks.acquire(timeout=60)
"""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every piece of work be shown, in one line after another."""
    monkeypatch.setattr(work_progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(work_progress, "LINE_S", 0.001)
    monkeypatch.delenv("RANK", raising=False)


def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.usefixtures("at_once")
def test_a_log_says_now_and_then_how_much_is_done_and_how_long_the_rest_takes():
    with capture_logs() as lines, long_work("exporting", 4.0, done=1.0, measured=lambda: 3.0):
        until(lambda: len(lines) > 1)
    first, *_, last = lines
    assert (first["event"], first["work"], first["percent"]) == ("work_goes_on", "exporting", 75)
    assert first["left_s"] == pytest.approx(first["seconds"] / 2, abs=0.1)
    assert (last["event"], last["work"]) == ("work_done", "exporting")


@pytest.mark.usefixtures("at_once")
def test_work_of_unknown_size_says_only_that_it_goes_on():
    with capture_logs() as lines, long_work("starting") as advance:
        advance(1)
        until(lambda: len(lines) > 0)
    assert {*lines[0]} == {"event", "log_level", "work", "seconds"}


@pytest.mark.usefixtures("at_once")
def test_work_that_fails_is_not_called_done():
    def fail() -> None:
        with long_work("saving", 2):
            until(lambda: len(lines) > 0)
            raise OSError("the disk is full")

    with capture_logs() as lines, pytest.raises(OSError, match="full"):
        fail()
    assert {line["event"] for line in lines} == {"work_goes_on"}


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    with capture_logs() as lines:
        assert [*tracked([1, 2, 3], "counting")] == [1, 2, 3]
    assert lines == []


@pytest.mark.usefixtures("at_once")
def test_only_the_first_rank_of_a_learner_shows_its_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    before = threading.active_count()
    with long_work("loading", 2):
        assert threading.active_count() == before


@pytest.mark.usefixtures("at_once")
def test_tracked_items_count_when_the_caller_is_done_with_them():
    with capture_logs() as lines:
        for _ in tracked(iter("ab"), "reading", 2):
            seen = len(lines)
            until(lambda seen=seen: len(lines) > seen + 1)
    percents = [line["percent"] for line in lines if "percent" in line]
    assert percents == sorted(percents)
    assert {*percents} <= {0, 50, 100}
    assert {0, 50} <= {*percents}


def on_terminal(form: str) -> str:
    """Return what the program writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm", "SLUICE_LOG_FORMAT": form}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, form], stderr=theirs, env=environment) as process:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 4096):
                written += part
        except OSError:  # Linux's way to say that the other end is closed
            pass
        os.close(ours)
        assert process.wait(60) == 0
    return written.decode()


def test_a_terminal_shows_a_bar_with_the_time_left():
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in on_terminal("text").split("\r")]
    bars = [line for line in lines if "━" in line]
    assert any(re.search(r"loading the weights .*25% .*left", bar) for bar in bars), lines
    assert max(map(len, bars)) <= 80


def test_json_logs_have_no_bar_on_a_terminal_either():
    lines = [json.loads(line) for line in on_terminal("json").splitlines() if line]
    assert [line["event"] for line in lines][-1] == "work_done"
    assert lines[0]["percent"] == 25
