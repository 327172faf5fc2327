"""What `launch storage`, `launch learner` and `launch actors` give to what they run, and refuse before."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import actors.service
import launch.services.actors
import launch.services.storage
import learner.run.service
import storage.service
from bus.connection.bus import Bus
from bus.errors import ConfigError, leaves
from bus.messages import RunRecord
from bus.server.nats_server import NatsServer
from launch.process.settings_revision import revision_of
from launch.run_view.run_lock import only_process
from launch.services.actors import serve_actors
from launch.services.learner import serve_learner
from launch.services.storage import serve_storage
from launch.settings.run_config import RunConfig, validate
from learner.config.process_settings import EngineContext
from storage.account.records import ACTORS
from storage.disk.run_directory import RunDirectory

pytestmark = pytest.mark.nats
SETTINGS: dict[str, Any] = {
    "run": "test",
    "data": {"task": "nim"},
    "policies": {"rival": {}},
    "evaluation": {"sets": [{"name": "hard", "prompts": "hard.jsonl"}]},
    "admission": {"max_staleness": 7, "samples_per_prompt": 4},
    "colocation": {"lapse_s": 20.0},
    "model": {"numerics": "exact"},
    "actors": {
        "environment": {"type": "game", "game": {"type": "nim"}, "opponent": "rival"},
        "evaluation": {"engine": "rollout"},
    },
}
OPEN = {"type": "clients", "reward": "posted", "gateway": {"host": "0.0.0.0"}}
ANSWERS = {"sampling": {"max_new_tokens": 64}, "model": {"scratch": {"context": 48}}}
"""Answers that leave no room for a prompt."""


@pytest.fixture
def where(bus_server: NatsServer, tmp_path: Path) -> dict[str, Any]:
    return {"directory": str(tmp_path), "bus": {"url": bus_server.url}}


async def announce(bus: Bus, settings: dict[str, Any]) -> RunConfig:
    config = validate(settings)
    await bus.put("run", RunRecord(name="test", config_json=config.model_dump_json()))
    return config


def capture(monkeypatch: pytest.MonkeyPatch, service: Any, name: str) -> list[Any]:
    """Have a service note its settings, with the bus that it got, in place of its work."""
    found: list[Any] = []

    async def note(bus: Bus, settings: Any, *others: Any, **named: Any) -> None:
        found.append((bus, settings, others, named))

    monkeypatch.setattr(service, name, note)
    return found


async def test_storage_is_told_what_the_settings_say_and_leaves_them_in_the_run_of_each_policy(
    bus: Bus, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    shared = {"model": {}, "learner": {"batch": {"share_prefixes": True}}}  # not exact
    config = validate({**SETTINGS, **where, **shared})
    found = capture(monkeypatch, storage.service, "run_storage")
    monkeypatch.setattr(launch.services.storage, "model_here", lambda path, directory: tmp_path / "model")
    monkeypatch.setattr(launch.services.storage, "counts_images", lambda config: True)
    await serve_storage(config, asyncio.Event(), summary=False)
    told = {settings.run.name: settings for _, settings, *_ in found}
    assert {name: settings.measures for name, settings in told.items()} == {
        "test": True,
        "test__rival": False,
    }
    own = told["test"]
    assert own.evaluation_sets == config.evaluation.sets
    assert (own.shares_prefixes, own.counts_images, own.admission) == (True, True, config.admission)
    assert own.model == tmp_path / "model"
    for used, settings, *_ in found:
        assert used.state.revision == revision_of(settings.config_json)
        assert (settings.run.path / "provenance.json").exists()
        assert json.loads(settings.config_json)["run"] == settings.run.name


async def test_a_second_storage_of_a_directory_is_refused_before_it_writes_there(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Its settings, its start and its failure would be taken for those of the run, which goes on."""
    found = capture(monkeypatch, storage.service, "run_storage")
    run = RunDirectory(tmp_path, "test")
    async with only_process(run.path / "storage.lock", patience_s=0):
        with pytest.raises(ExceptionGroup) as raised:
            await serve_storage(validate({"run": "test", "data": {"task": "sort"}, **where}), asyncio.Event())
    [error] = leaves(raised.value)
    assert isinstance(error, ConfigError)
    assert f"already going on in {run.path}, process {os.getpid()}" in str(error)
    assert [path.name for path in run.path.iterdir()] == ["storage.lock"]
    assert not found


async def test_a_holder_of_a_lock_in_another_container_is_not_taken_for_a_process_of_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    lock = tmp_path / "storage.lock"
    async with only_process(lock, patience_s=0):
        monkeypatch.setattr("launch.run_view.run_lock.pids_of", lambda: "another")
        with pytest.raises(
            ConfigError, match=rf"process {os.getpid()} of another container or host: stop that"
        ):
            async with only_process(lock, patience_s=600):
                pass


async def test_who_waits_for_processes_that_inherited_a_lock_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("launch.run_view.run_lock.SAY_AFTER_S", 0)
    lock = tmp_path / "lock"
    ended = 2**22 + 1  # above the largest number that a process may have
    async with only_process(lock, patience_s=0):
        lock.write_text(str(ended))
        with capture_logs() as logs, pytest.raises(ConfigError, match="is already going on"):
            async with only_process(lock, patience_s=0.5):
                pass
    assert [(one["event"], one["ended"]) for one in logs] == [("waiting_for_earlier_processes", ended)]


@pytest.mark.parametrize(("alone", "recorded"), [(True, 1), (False, 0)])
async def test_changes_are_recorded_once_by_storage_or_by_the_launch_that_starts_it(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alone: bool, recorded: int
):
    capture(monkeypatch, storage.service, "run_storage")
    config = validate({"run": "test", "data": {"task": "sort"}, **where})
    run = RunDirectory(tmp_path, "test")
    run.config.write_text(config.model_copy(update={"seed": 7}).model_dump_json())
    await serve_storage(config, asyncio.Event(), summary=alone)
    [start] = json.loads(run.provenance.read_text())
    assert len(start["changed"]) == recorded


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (ANSWERS, "leaves no room for a prompt"),
        ({"actors": {"evaluation": {"only": True}}}, "no actor would"),
    ],
)
async def test_storage_refuses_settings_by_which_no_run_comes_about(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], said: str
):
    found = capture(monkeypatch, storage.service, "run_storage")
    with pytest.raises(ExceptionGroup) as raised:
        await serve_storage(
            validate({"run": "test", "data": {"task": "sort"}, **where, **changed}), asyncio.Event()
        )
    [error] = leaves(raised.value)
    assert isinstance(error, ConfigError)
    assert said in str(error)
    assert not found


async def test_an_actor_is_told_what_the_settings_say(
    bus: Bus, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    config = await announce(bus, SETTINGS)
    found = capture(monkeypatch, actors.service, "run_actors")
    monkeypatch.setattr(
        launch.services.actors, "shares_servers", lambda config, name, engine: name == "rival"
    )
    await serve_actors(validate({"run": "test", **where}), {}, asyncio.Event())
    [(_, told, *_)] = found
    assert (told.max_staleness, told.colocation) == (7, config.colocation)
    assert told.account == tmp_path / "test" / ACTORS
    assert told.calls_rewards
    assert told.exact
    assert told.rollout_engine.type == config.actors.engine.type
    further = told.further["rival"]
    assert (further.max_staleness, further.account) == (7, tmp_path / "test__rival" / ACTORS)
    assert further.shares_servers
    assert further.exact


async def test_clients_need_the_token_of_the_gateway(
    bus: Bus, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    clients = {"environment": {"type": "clients", "reward": "posted"}}
    await announce(bus, {"run": "test", "data": {"task": "sort"}, "actors": clients})
    found = capture(monkeypatch, actors.service, "run_actors")
    monkeypatch.setattr(launch.services.actors, "gateway_token", lambda config: config.run)
    await serve_actors(validate({"run": "test", **where}), {}, asyncio.Event())
    [(_, _, (environment, _), _)] = found
    assert environment.token == "test"


async def test_an_actor_refuses_a_gateway_that_is_open_to_everybody(
    bus: Bus, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    await announce(bus, {"run": "test", "data": {"task": "sort"}, "actors": {"environment": OPEN}})
    found = capture(monkeypatch, actors.service, "run_actors")
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 would let everybody"):
        await serve_actors(validate({"run": "test", **where}), {}, asyncio.Event())
    assert not found


async def test_a_learner_is_told_what_the_settings_say_and_notes_them_once_it_is_the_runs(
    bus: Bus, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    engine = {"type": "sglang", "server": {"context_length": 96}}
    served = {"model": {}, "policies": {}, "data": {"task": "sort"}, "actors": {"engine": engine}}
    config = await announce(bus, {**SETTINGS, **served})
    found = capture(monkeypatch, learner.run.service, "run")
    await serve_learner(validate({"run": "test", **where}), {}, asyncio.Event(), is_rank=False)
    [(_, told, _, named)] = found
    assert (told.evaluated_on, told.colocation) == ("rollout", config.colocation)
    assert told.engine_context == EngineContext(96, 2)
    assert told.samples_per_prompt == 4
    recorded = tmp_path / "test" / "learner.json"
    assert not recorded.exists()
    named["begin"]()
    assert recorded.exists()
