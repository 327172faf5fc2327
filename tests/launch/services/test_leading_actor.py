"""`launch actors` as node 0 of an engine of several: it begins anew when another node is lost."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import actors.service
from bus.connection.bus import Bus
from bus.errors import ConfigError, EngineError, EngineNodeLostError, leaves
from bus.messages import RunRecord
from bus.server.nats_server import NatsServer
from launch.services.actors import serve_actors
from launch.settings.run_config import RunConfig, validate

pytestmark = pytest.mark.nats
RESTARTS = 2
NODES = {
    "type": "sglang",
    "nodes": 2,
    "rendezvous": "head:29500",
    "update": "tensor",
    "server": {"tp_size": 2},
}
LOST, FAILED = EngineNodeLostError("node 1 (there) is gone"), EngineError("the GPU is gone")


@pytest.fixture
async def where(bus: Bus, bus_server: NatsServer, tmp_path: Path) -> RunConfig:
    fleet = {"restarts": RESTARTS, "backoff_s": 0.01}
    run = validate({"run": "test", "data": {"task": "sort"}, "actors": {"engine": NODES, "fleet": fleet}})
    await bus.put("run", RunRecord(name="test", config_json=run.model_dump_json()))
    return validate({"run": "test", "directory": str(tmp_path), "bus": {"url": bus_server.url}})


def ending(*errors: Exception | None, then: Callable[[], None] = lambda: None) -> tuple[Any, list[object]]:
    """Return what stands for an actor that ends so, one time after the other, and each environment it had."""
    had: list[object] = []

    async def run_actors(bus: Bus, settings: Any, environment: object, stop: asyncio.Event) -> None:
        had.append(environment)
        then()
        if error := errors[min(len(had), len(errors)) - 1]:
            raise ExceptionGroup("an actor's tasks", [error])

    return run_actors, had


async def test_it_serves_again_with_all_of_its_parts_made_anew(where: RunConfig, monkeypatch):
    run_actors, had = ending(LOST, LOST, None)
    monkeypatch.setattr(actors.service, "run_actors", run_actors)
    with capture_logs() as logs:
        await serve_actors(where, {}, asyncio.Event())
    assert len({id(environment) for environment in had}) == 3
    said = [(one["reason"], one["pause_s"]) for one in logs if one["event"] == "engine_begins_anew"]
    assert said == [("node 1 (there) is gone", 0.01), ("node 1 (there) is gone", 0.02)]


@pytest.mark.parametrize(("error", "times"), [(LOST, RESTARTS + 1), (FAILED, 1)])
async def test_it_gives_up_after_the_restarts_of_the_fleet_and_at_once_where_no_node_is_lost(
    where: RunConfig, monkeypatch, error: Exception, times: int
):
    run_actors, had = ending(error)
    monkeypatch.setattr(actors.service, "run_actors", run_actors)
    with pytest.raises(ExceptionGroup) as raised:
        await serve_actors(where, {}, asyncio.Event())
    assert [*leaves(raised.value)] == [error]
    assert len(had) == times


@pytest.mark.parametrize(
    ("own", "remedy"),
    [
        ({"rendezvous": ""}, "needs actors.engine.rendezvous=HOST:PORT"),
        ({"node_rank": 2}, "node_rank=2 of nodes=2"),
        ({"nodes": 1}, "are for an engine of several nodes"),
    ],
)
async def test_a_host_says_its_own_place_alone_and_a_wrong_one_is_refused(
    where: RunConfig, own: dict[str, Any], remedy: str
):
    with pytest.raises(ConfigError, match=remedy):
        await serve_actors(where, {"actors": {"engine": {"type": "sglang", **own}}}, asyncio.Event())


async def test_it_does_not_begin_anew_once_it_is_stopped(where: RunConfig, monkeypatch):
    stop = asyncio.Event()
    run_actors, had = ending(LOST, then=stop.set)
    monkeypatch.setattr(actors.service, "run_actors", run_actors)
    await serve_actors(where, {}, stop)
    assert len(had) == 1
