"""Commands that ask a process of a run: a refusal is told as one, and a time-out never as a fact."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from bus.codec import Message
from bus.connection.bus import Bus
from bus.errors import BusAwayError, ConfigError
from bus.requests import Done, Profiled, ProfileRequest
from launch.operations import process_answer
from launch.operations.engines import engines_heard
from launch.operations.process_answer import Asked, answer_of
from tests.launch.messages import actor

ASKED = Asked("the learner", "it has no profile", "whether it takes one is not known")


async def ask(bus: Bus, timeout_s: float = 30.0) -> Profiled:
    return await answer_of(bus, "profile", ProfileRequest(steps=1), Profiled, ASKED, timeout_s=timeout_s)


@pytest.mark.nats
async def test_a_refusal_is_told_as_one_and_a_time_out_as_what_is_not_known(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process_answer, "SAY_AFTER_S", 0.05)
    with pytest.raises(
        BusAwayError, match=r"^the learner of run 'test': nobody serves .*nothing was asked of it"
    ):
        await ask(bus)

    async def refuse(_: ProfileRequest) -> list[Message]:
        raise ConfigError("another is being taken")

    serving = await bus.serve("profile", ProfileRequest, refuse)
    with pytest.raises(ConfigError, match=r"^it has no profile: another is being taken$"):
        await ask(bus)
    await serving.unsubscribe()

    async def answer_late(_: ProfileRequest) -> list[Message]:
        await released.wait()
        return [Done()]

    released = asyncio.Event()
    await bus.serve("profile", ProfileRequest, answer_late)
    with (
        capture_logs() as logs,
        pytest.raises(
            BusAwayError, match=r"no answer from profile within 0\.3 s .*; whether it takes one is not"
        ),
    ):
        await ask(bus, timeout_s=0.3)
    released.set()
    assert [(one["event"], one["who"]) for one in logs] == [("waiting_for_answer", "the learner")]


def test_engines_are_listed_of_the_actors_that_were_heard_and_nothing_is_guessed_of_others():
    with pytest.raises(
        ConfigError, match=r"^no actor of run 'r' was heard within 2 s: if none runs on this bus"
    ):
        engines_heard([], "r")
    waiting = replace(actor(0, doing="waiting for a policy"), values={})
    with pytest.raises(
        ConfigError, match=r"^no actor that was heard of run 'r' has an engine yet: .*waiting for a"
    ):
        engines_heard([waiting], "r")
    has = actor(1, engines={"engine-0": {"state": "serving"}})
    assert engines_heard([waiting, has], "r") == {has.source: {"engine-0": {"state": "serving"}}}
