"""Which run a learner joins that is started for a further policy."""

import asyncio

import pytest

from bus.connection.bus import Bus
from bus.errors import ConfigError
from bus.messages import RunRecord
from bus.server.nats_server import NatsServer
from launch.services.learner import serve_policy_learner
from launch.settings.run_config import resolve, validate

pytestmark = pytest.mark.nats
DUEL = {"run": "test", "data": {"task": "nim"}, "actors": {"environment": {
    "type": "game", "game": {"type": "nim"}, "opponent": "rival",
}}}  # fmt: skip


async def test_a_learner_of_a_policy_that_the_run_does_not_train_is_refused(bus: Bus, bus_server: NatsServer):
    config = resolve(DUEL, {"policies": {"rival": {}}})
    await bus.put("run", RunRecord(name="test", config_json=config.model_dump_json()))
    where = validate({"run": "test", "bus": {"url": bus_server.url}})
    with pytest.raises(ConfigError, match=r"no policy 'rivla' beside its own: did you mean 'rival'\?"):
        await serve_policy_learner(where, {}, "rivla", asyncio.Event(), is_rank=False)


async def test_a_learner_of_a_further_policy_waits_for_the_storage_of_its_own_run(
    bus: Bus, server: NatsServer
):
    config = resolve(DUEL, {"policies": {"rival": {}}})
    await bus.put("run", RunRecord(name="test", config_json=config.model_dump_json()))
    where = validate({"run": "test", "bus": {"url": server.url, "join_timeout_s": 0.1}})
    with pytest.raises(Exception, match="launch storage --run test__rival"):
        await serve_policy_learner(where, {}, "rival", asyncio.Event(), is_rank=False)
