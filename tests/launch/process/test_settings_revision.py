"""A process that goes on while storage is started again with other settings says by which it works."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bus.connection import roles, status
from bus.connection.bus import Bus
from bus.connection.status import Activity, report_status
from bus.errors import BusAwayError, ConfigError, leaves
from bus.messages import RunRecord, Status
from launch.process import settings_revision
from launch.process.run_connection import connected, joined
from launch.process.settings_revision import differences, refuse_unapplied, revision_of
from launch.run_view.waiting_reasons import problems
from launch.screens.status_report import report
from launch.services.storage import serve_storage
from launch.settings.run_config import RunConfig, validate
from tests.bus.security.secured import by_role, make_streams, secured_bus
from tests.launch.messages import state_of

LR = "learner.optimizer.lr"


def record(**optimizer: float) -> RunRecord:
    config = validate({"run": "test", "learner": {"optimizer": optimizer}, "data": {"task": "sort"}})
    return RunRecord(name="test", config_json=config.model_dump_json())


async def statuses(bus: Bus, wanted: bool) -> Status:
    """The next status that names settings which differ, or that names none."""
    found: asyncio.Future[Status] = asyncio.get_running_loop().create_future()

    def hear(status: Status) -> None:
        if bool(status.settings_differ) == wanted and not found.done():
            found.set_result(status)

    heard = await bus.listen(bus.subject("status", "*"), Status, hear)
    try:
        async with asyncio.timeout(60):
            return await found
    finally:
        await heard.unsubscribe()


@pytest.mark.nats
@pytest.mark.parametrize("role", ["learner", "actors"])
async def test_settings_that_storage_alone_has_taken_are_named_by_who_goes_on_without_them(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, role: str
):
    monkeypatch.setattr(settings_revision, "PERIOD_S", 0.02)
    where = RunConfig(run="test", bus=validate({"bus": {"url": bus.client.connected_url.geturl()}}).bus)
    first, other = record(lr=1e-4), record(lr=5e-4)
    await bus.put("run", first)
    with capture_logs() as said:
        async with connected(where, role, asyncio.Event()) as own:
            config = await joined(own, where, {}, asyncio.Event())
            assert config.learner.optimizer.lr == 1e-4
            stop = asyncio.Event()
            reporting = asyncio.create_task(
                report_status(own, source=role, role=role, look=lambda: Activity("works"), stop=stop)
            )
            assert (await statuses(bus, wanted=False)).revision == revision_of(first.config_json)
            await bus.put("run", other)
            if role == "learner":
                status = await statuses(bus, wanted=True)
                assert status.settings_differ == (f"{LR}: 0.0001 here, 0.0005 in the run",)
                state = state_of(status, asked_s=1.0)
                assert any(LR in problem and "start it again" in problem for problem in problems(state))
                assert report(state)["members"][0]["revision"] == revision_of(first.config_json)
                await bus.put("run", first)
            await statuses(bus, wanted=False)
            stop.set()
            await reporting
    warned = [line["settings"] for line in said if line["event"] == "settings_differ"]
    assert warned == ([[f"{LR}: 0.0001 here, 0.0005 in the run"]] if role == "learner" else [])


@pytest.mark.nats
@pytest.mark.parametrize("is_here", [True, False])
async def test_a_process_started_beside_storage_joins_by_what_that_announces(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, is_here: bool
):
    monkeypatch.setattr(roles, "RENEW_S", 0.05)
    if not is_here:
        monkeypatch.setattr(roles, "pids_of", lambda: "")
    where = RunConfig(run="test", bus=validate({"bus": {"url": bus.client.connected_url.geturl()}}).bus)
    await bus.put("run", replace(record(lr=1e-4), announced_by="earlier"))
    async with connected(where, "learner", asyncio.Event()) as own:
        joining = asyncio.create_task(joined(own, where, {}, asyncio.Event()))
        async with roles.hold_role(bus, "dispatcher", "now"):
            await asyncio.wait({joining}, timeout=0.3)  # storage opens its prompts meanwhile
            await bus.put("run", replace(record(lr=5e-4), announced_by="now"))
            assert (await asyncio.wait_for(joining, 60)).learner.optimizer.lr == 5e-4


@pytest.mark.nats
async def test_without_storage_a_process_joins_by_what_the_bus_keeps_in_the_end(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(roles, "EXPIRE_S", 0.1)
    given = {"url": bus.client.connected_url.geturl(), "join_timeout_s": 0.5}
    where = RunConfig(run="test", bus=validate({"bus": given}).bus)
    await bus.put("run", replace(record(lr=1e-4), announced_by="earlier"))
    with capture_logs() as said:
        async with connected(where, "learner", asyncio.Event()) as own:
            assert (await joined(own, where, {}, asyncio.Event())).learner.optimizer.lr == 1e-4
        async with connected(where, "watch", asyncio.Event()) as own:  # a screen changes nothing
            assert await joined(own, where, {}, asyncio.Event()) is not None
    assert [line["event"] for line in said].count("joined_without_storage") == 1
    async with roles.hold_role(bus, "dispatcher", "now"), connected(where, "learner", asyncio.Event()) as own:
        with pytest.raises(BusAwayError, match=r"waited 0\.5 s for the settings that storage on"):
            await joined(own, where, {}, asyncio.Event())


@pytest.mark.nats
async def test_storage_is_refused_with_settings_by_which_a_living_process_would_not_go_on(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(settings_revision, "STATUS_PERIOD_S", 0.15)
    monkeypatch.setattr(status, "PERIOD_S", 0.02)
    url = bus.client.connected_url.geturl()
    run = {"run": "test", "directory": str(tmp_path), "bus": {"url": url}, "data": {"task": "sort"}}
    await bus.put("run", RunRecord(name="test", config_json=validate(run).model_dump_json()))
    other = validate({**run, "learner": {"optimizer": {"lr": 5e-4}}})
    learners, actors = (
        validate({**run, "sampling": {"temperature": 0.5}}),
        validate({**run, "metrics": {"tensorboard": True}}),
    )
    async with Bus.connect(validate(run).bus, "test", name="actor") as own:
        stop = asyncio.Event()
        reporting = asyncio.create_task(
            report_status(own, source="actor-1", role="actor", look=lambda: Activity("works"), stop=stop)
        )
        for allowed in (other, actors):  # an actor reads neither, and no learner is alive
            await refuse_unapplied(bus, allowed)
        with pytest.raises(ExceptionGroup) as raised:
            await serve_storage(learners, asyncio.Event())
        [error] = leaves(raised.value)
        assert isinstance(error, ConfigError)
        assert str(error).startswith(
            "actor-1 is alive and would go on by other settings: sampling.temperature: 1.0 in the run, 0.5 "
            "here. Stop it, start storage"
        )
        assert not (tmp_path / "test" / "config.json").exists()
        stop.set()
        await reporting
        await refuse_unapplied(bus, learners)
        async with roles.hold_role(own, "learner", "builds its model, and says nothing yet"):
            await refuse_unapplied(bus, actors)
            with pytest.raises(ConfigError, match=r"^the learner \(process \d+ on .*\) is alive and would"):
                await refuse_unapplied(bus, other)
        for role, refused in (
            ("learner", {"learner": {"optimizer": {"lr": 5e-4}}}), ("shards", {"replay": {"linger_s": 9.0}})
        ):  # fmt: skip
            stop = asyncio.Event()
            reporting = asyncio.create_task(
                report_status(own, source=role, role=role, look=lambda: Activity("works"), stop=stop)
            )
            with pytest.raises(ConfigError, match=f"^{role} is alive and would go on by other settings"):
                await refuse_unapplied(bus, validate({**run, **refused}))
            stop.set()
            await reporting


def test_a_process_is_told_of_what_it_reads_alone():
    before = validate({"run": "test"})
    after = validate({
        "run": "test", "replay": {"linger_s": 9.0}, "metrics": {"tensorboard": True},
        "sampling": {"temperature": 0.5}, "learner": {"loss": {"type": "gspo"}},
    })  # fmt: skip
    named = {
        role: {one.split(":")[0] for one in differences(before, after, role)} for role in ("shards", "actors")
    }
    assert named["shards"] == {"replay.linger_s"}
    assert named["actors"] == {"replay.linger_s", "sampling.temperature"}
    assert "learner.loss.type" in {one.split(":")[0] for one in differences(before, after, "learner")}
    assert not any(one.startswith("metrics") for one in differences(before, after, "learner"))


def test_a_revision_is_that_of_the_settings_whatever_their_order():
    config = json.loads(record(lr=1e-4).config_json)
    backwards = json.dumps(dict(reversed(config.items())))
    assert (
        revision_of(backwards) == revision_of(json.dumps(config)) != revision_of(record(lr=2e-4).config_json)
    )


@pytest.mark.nats
async def test_on_a_secured_bus_each_role_is_heard_as_itself_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(settings_revision, "STATUS_PERIOD_S", 0.15)
    monkeypatch.setattr(status, "PERIOD_S", 0.02)
    run = {"run": "mine", "data": {"task": "sort"}}
    other = validate({**run, "replay": {"linger_s": 9.0}, "learner": {"optimizer": {"lr": 5e-4}}})
    async with secured_bus(tmp_path, "mine") as (secure, _):
        as_role = by_role(secure)
        await make_streams(as_role)
        async with as_role("storage") as bus, as_role("storage") as shards, as_role("actor") as thief:
            await bus.put("run", RunRecord(name="mine", config_json=validate(run).model_dump_json()))
            for said in ("learner", "anything"):
                forged = Status(source="thief", role=said, doing="", pid=1, peak_rss_bytes=0, values={})
                sending = asyncio.create_task(_repeat(thief, forged))
                await refuse_unapplied(bus, validate({**run, "learner": {"optimizer": {"lr": 5e-4}}}))
                sending.cancel()
            monkeypatch.setattr(settings_revision, "STATUS_PERIOD_S", 0.5)
            stop = asyncio.Event()
            reporting = asyncio.create_task(
                report_status(shards, source="shards-0", role="shards", look=lambda: Activity(""), stop=stop)
            )
            with pytest.raises(ConfigError, match=r"^shards-0 is alive"):
                await refuse_unapplied(bus, other)
            stop.set()
            await reporting


async def _repeat(bus: Bus, forged: Status) -> None:
    while True:
        await bus.notify(bus.subject("status", "actor"), forged)
        await asyncio.sleep(0.02)
