"""How far further policies are, as a run's screens show it."""

from dataclasses import replace

from launch.run_view.monitor import RunMonitor
from launch.screens import terminal_view as view
from launch.screens.status_report import report, screen
from tests.launch.messages import FACTS, actor, learner, state_of

AHEAD = {"rival": {"stage": "rl", "step": 6, "published": 8, "oldest_in_use": 8}}
BEHIND = {"rival": {"stage": "rl", "step": 5, "published": 7, "oldest_in_use": 6}}


def statuses():
    for number, policies in enumerate((BEHIND, AHEAD)):
        found = actor(number)
        yield replace(found, values={**found.values, "policies": policies})


def test_screens_show_the_newest_that_an_actor_heard_and_the_oldest_that_one_uses():
    expected = "rival      rl, step 6: v8 published, v6 in use"
    monitor = RunMonitor(FACTS)
    for status in (learner(), *statuses()):
        monitor.on_status(status)
    assert expected in [line.plain for line in view.screen(monitor, 80)]
    state = state_of(*statuses(), name="duel")
    found = report(state)
    assert found["policies"] == {"rival": AHEAD["rival"] | {"oldest_in_use": 6}}
    assert expected in screen(found).splitlines()


def test_a_policy_that_nobody_has_published_yet_says_so():
    status = actor(0)
    none = {"rival": {"stage": "starting", "step": 0, "published": -1, "oldest_in_use": -1}}
    monitor = RunMonitor(FACTS)
    monitor.on_status(replace(status, values={**status.values, "policies": none}))
    assert "rival      not published yet" in [line.plain for line in view.screen(monitor, 80)]


def test_a_run_of_one_policy_has_no_line_for_others():
    monitor = RunMonitor(FACTS)
    monitor.on_status(actor(0))
    assert not monitor.policies
