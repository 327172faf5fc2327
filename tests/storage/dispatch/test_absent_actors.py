"""Two minutes without any actor are said in storage's log, with what to do."""

from structlog.testing import capture_logs

from storage.dispatch.absent_actors import AbsentActors


class Minutes:
    """A clock on which each look comes a minute after the one before."""

    def __init__(self):
        self.now_s = 0.0
        self.absent = AbsentActors(lambda: self.now_s)

    def look(self, leases: int, pulls: int = 0, held: int = 0, *, times: int = 1) -> list[str]:
        with capture_logs() as logs:
            for _ in range(times):
                self.now_s += 60
                self.absent.look(waiting_leases=leases, waiting_pulls=pulls, held_leases=held)
        return [line["event"] for line in logs]


def test_absence_is_said_after_two_minutes_and_then_every_ten():
    time = Minutes()
    assert time.look(8, times=3) == []
    assert time.look(8) == ["no_actors"]
    assert time.absent.absent_s == 180
    assert time.look(8, times=10) == []
    assert time.look(8) == ["no_actors"]
    time.look(8, pulls=1)
    assert time.absent.absent_s == 0
    assert time.look(8, times=4) == ["no_actors"]  # they are gone again


def test_actors_that_wait_or_roll_out_are_there_and_without_leases_none_is_missed():
    time = Minutes()
    for look in ({"pulls": 1}, {"held": 1}):
        assert time.look(8, **look, times=5) == []
    assert time.look(0, times=5) == []
    assert time.look(8, times=3) == []


def test_an_actor_that_ended_is_named_until_another_one_counts():
    absent = AbsentActors()
    with capture_logs() as logs:
        absent.write({"source": "actor-1", "engine/busy_s": 1.0, "ended": "of the latest 64 " + "x" * 9000})
    [line] = logs
    assert (line["event"], line["actor"], len(line["reason"])) == ("actor_ended", "actor-1", 9017)
    absent.write({"source": "actor-1", "engine/busy_s": 1.0})  # sent before, and recorded late
    absent.write({"source": "learner", "train/loss": 1.0})
    assert absent.alarm.startswith("actor-1 ended: of the latest 64")
    assert len(absent.alarm) < 500
    absent.write({"source": "actor-2", "engine/busy_s": 0.0})
    assert absent.alarm == ""
