"""The question of how a run is, asked again after one that failed."""

import asyncio
import re

import pytest

from bus.errors import BusAwayError, ConfigError
from bus.messages import BlobRef, PolicyManifest
from launch.dashboard.flow import flow
from launch.dashboard.status_watch import PERIOD_S, StatusWatch
from launch.run_view.run_status import RunState
from launch.settings.run_config import RunConfig
from tests.launch.messages import learner, state_of


async def look_until_answered(watch: StatusWatch) -> None:
    """Look as pages do until a question was answered. Raises what one failed by."""
    async with asyncio.timeout(60):
        while not watch.revision:
            watch.look()
            await asyncio.sleep(0)


async def test_a_question_that_failed_is_told_once_and_then_asked_again(monkeypatch: pytest.MonkeyPatch):
    answers: list[Exception] = [ConfigError("no bus is known"), RuntimeError("a fault of ours")]

    def locate(run: str) -> RunConfig:
        raise answers.pop() if len(answers) > 1 else answers[0]

    monkeypatch.setattr("launch.dashboard.status_watch.AWAY_PERIOD_S", 0)
    watch = StatusWatch("demo", locate)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await look_until_answered(watch)
    await look_until_answered(watch)
    await watch.close()
    assert watch.payload()["why"] == "no bus is known"


async def test_old_answers_are_not_shown_to_who_looks_after_a_while(monkeypatch: pytest.MonkeyPatch):
    states = [state_of(learner(), asked_s=1000.0)]

    async def look_at_run(*_: object) -> RunState:
        if not states:
            raise BusAwayError("no answer")
        return states.pop()

    monkeypatch.setattr("launch.dashboard.status_watch.look_at_run", look_at_run)
    watch = StatusWatch("demo", lambda run: RunConfig(run=run))
    await look_until_answered(watch)
    watch.look()
    assert (watch.revision, watch.payload()["live"]) == (1, True)
    monkeypatch.setattr("launch.dashboard.status_watch.OLD_S", 0)
    watch._asked_s -= PERIOD_S
    watch.look()
    assert (watch.revision, watch.state) == (0, None), "the page says that the run is asked"
    await look_until_answered(watch)
    await watch.close()
    assert str(watch.payload()["why"]).startswith("no answer; the run answered last at ")


def test_a_page_tells_nothing_of_parts_that_were_not_heard_but_since_when():
    blob = BlobRef(subject="s", chunks=0, size_bytes=0, digest="")
    policy = PolicyManifest(policy_version=4, incarnation="a", snapshot=blob, model=blob, stage="rl")
    silent = state_of(asked_s=1000.0)
    silent.policy, silent.renewed_s = policy, {"dispatcher": 953.0, "learner": 990.0}
    prompts, actors, store, trains, weights = (dict(place) for place in flow(silent))
    assert {place["condition"] for place in (prompts, actors, store, trains, weights)} == {"silent"}
    for place, name, ago in ((prompts, "storage", 47), (store, "storage", 47), (trains, "learner", 10)):
        assert re.fullmatch(rf"{name} was not heard, silent since [\d:]{{8}} \({ago}\.0 s\)", place["doing"])
    assert ["-", "requests run in engines"] in actors["figures"]
    assert weights["doing"] == "no actor was heard: which weights engines have is not known"
