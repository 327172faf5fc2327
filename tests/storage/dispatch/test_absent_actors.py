"""Minutes without any actor are said in storage's log, and a learner for which none comes is told why."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bus.messages import Status, Wait
from storage.dispatch.absent_actors import AbsentActors
from storage.ledger.ledger import Ledger


class Minutes:
    """A clock on which each look comes a minute after the one before."""

    def __init__(self, ledger: Ledger) -> None:
        self.now_s = 0.0
        self.absent = AbsentActors(ledger, lambda: self.now_s)

    def look(self, leases: int, pulls: int = 0, held: int = 0, *, times: int = 1) -> list[str]:
        with capture_logs() as logs:
            for _ in range(times):
                self.now_s += 60
                self.absent.look(waiting_leases=leases, waiting_pulls=pulls, held_leases=held)
        return [line["event"] for line in logs]

    def counts(self, actor: str, time_s: float) -> None:
        self.absent.write({"source": actor, "time_s": time_s, "engine/busy_s": 1.0})

    def ends(self, actor: str, time_s: float, reason: str = "of the latest 64 rollouts, 64 failed") -> None:
        self.absent.write({"source": actor, "time_s": time_s, "engine/busy_s": 1.0, "ended": reason})


@pytest.fixture
def time(tmp_path: Path) -> Iterator[Minutes]:
    """Looks of a new run."""
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as ledger:
        yield Minutes(ledger)


def status(wait: Wait) -> Status:
    return Status(source="actor-3", role="actor", doing="", pid=1, peak_rss_bytes=0, values={}, wait=wait)


def test_absence_is_said_after_two_minutes_and_then_every_ten(time):
    assert time.look(8, times=3) == []
    assert time.look(8) == ["no_actors"]
    assert time.absent.absent_s == 180
    assert time.look(8, times=10) == []
    assert time.look(8) == ["no_actors"]
    time.look(8, pulls=1)
    assert time.absent.absent_s == 0
    assert time.look(8, times=4) == ["no_actors"]  # they are gone again


def test_actors_that_wait_or_roll_out_are_there_and_without_leases_none_is_missed(time):
    for look in ({"pulls": 1}, {"held": 1}):
        for _ in range(5):
            time.counts("actor-1", time.now_s)
            assert time.look(8, **look) == []
    assert time.look(0, times=5) == []
    assert time.look(8, times=3) == []


def test_leases_that_the_server_calls_held_by_an_actor_that_is_gone_are_missed(time):
    time.counts("actor-1", time.now_s)
    assert time.look(0, held=8, times=8) == ["no_actors"]


def test_an_actor_that_ended_is_named_until_another_one_counts(time):
    with capture_logs() as logs:
        time.ends("actor-1", 100.0, "of the latest 64 " + "x" * 9000)
    [line] = logs
    assert (line["event"], line["actor"], len(line["reason"])) == ("actor_ended", "actor-1", 9017)
    time.counts("actor-1", 99.0)  # sent before, and recorded late
    time.absent.write({"source": "learner", "time_s": 101.0, "train/loss": 1.0})
    assert time.absent.alarm.startswith("actor-1 ended: of the latest 64")
    assert len(time.absent.alarm) < 500
    time.counts("actor-2", 101.0)
    assert time.absent.alarm == ""
    time.ends("actor-1", 102.0)
    for started_s in (103.0, -3000.0):  # again under its name, as a container is; with its clock set back
        time.counts("actor-1", started_s)
        assert time.absent.alarm == ""
        time.ends("actor-1", 102.0)


def test_a_learner_waits_five_minutes_for_another_actor_than_those_that_ended(time):
    time.look(8, times=10)
    assert time.absent.failure == ""  # none has ended: they are yet to come
    time.counts("actor-1", 1.0)
    time.ends("actor-1", 2.0)
    time.ends("actor-2", 2.0, "another reason")
    for wait, waits_on in (("engine", True), ("policy", True), ("versions", False), ("", False)):
        time.absent.give_time()
        time.look(8, times=4)
        assert time.absent.failure == ""
        time.absent.hear(status(wait))
        time.look(8)
        assert (time.absent.failure == "") == waits_on
    assert "actor-1: of the latest 64 rollouts, 64 failed\nactor-2: another reason" in time.absent.failure
    time.counts("actor-3", 3.0)
    assert time.absent.failure == ""


def test_who_has_ended_is_known_after_a_restart_of_storage(tmp_path):
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as ledger:
        first = Minutes(ledger)
        first.ends("actor-1", 2.0)
        ledger.flush()
    said = first.absent.alarm
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as ledger:
        again = Minutes(ledger)
        assert again.absent.alarm == said
        again.counts("actor-1", 1.0)
        assert again.absent.alarm == said
        again.look(8, times=4)
        assert again.absent.failure == ""  # it begins to wait anew
        again.look(8)
        assert "actor-1: of the latest" in again.absent.failure
        again.counts("actor-2", 3.0)
        assert (again.absent.alarm, AbsentActors(ledger).alarm) == ("", "")
