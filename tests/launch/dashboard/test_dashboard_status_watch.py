"""The question of how a run is, asked again after one that failed."""

import asyncio

import pytest

from bus.errors import ConfigError
from launch.dashboard.status_watch import StatusWatch
from launch.settings.run_config import RunConfig


async def look_until_answered(watch: StatusWatch) -> None:
    """Look as pages do until a question was answered. Raises what one failed by."""
    async with asyncio.timeout(10):
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
