"""Commands that ask a process of a run: a refusal is told as one, and a time-out never as a fact."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from bus import waiting
from bus.codec import Message
from bus.connection.bus import Bus
from bus.errors import BusAwayError, BusError, ConfigError
from bus.messages import RunRecord
from bus.requests import Done, Profiled, ProfileRequest, StoredRequest
from bus.server.nats_server import NatsServer
from launch.operations.live_run import Asked, answer_of, engines_heard
from launch.settings.run_config import validate
from launch.trajectories import sources
from launch.trajectories.sources import BusTrajectories
from tests.launch.messages import actor

ASKED = Asked("the learner", "it has no profile", "whether it takes one is not known")


async def ask(bus: Bus, timeout_s: float = 30.0) -> Profiled:
    return await answer_of(bus, "profile", ProfileRequest(steps=1), Profiled, ASKED, timeout_s=timeout_s)


@pytest.mark.nats
async def test_a_refusal_is_told_as_one_and_a_time_out_as_what_is_not_known(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(waiting, "SLOW_S", 0.05)
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


@pytest.mark.nats
async def test_who_reads_trajectories_of_a_shard_that_stands_still_is_told_which(
    bus: Bus, server: NatsServer, monkeypatch: pytest.MonkeyPatch
):
    async def answer_late(_: StoredRequest) -> list[Message]:
        await released.wait()
        return [Done()]

    monkeypatch.setattr(waiting, "SLOW_S", 0.05)
    monkeypatch.setattr(sources, "ANSWER_TIMEOUT_S", 0.3)
    where, released = validate({"run": "test", "bus": {"url": server.url}}), asyncio.Event()
    await bus.put("run", RunRecord(name="test", config_json=where.model_dump_json()))
    await bus.serve(bus.subject("rpc", "stored", 0), StoredRequest, answer_late)
    async with BusTrajectories(lambda: where).groups() as groups:
        with (
            capture_logs() as logs,
            pytest.raises(BusError, match=r"no answer from .*stored\.0 within 0\.3 s"),
        ):
            await groups.leases()
    released.set()
    assert [one["who"] for one in logs if one["event"] == "waiting_for_answer"] == ["shard 0"]


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
