"""A real SGLang server begins with requests of the oldest leases, where its settings say so."""

import asyncio
from dataclasses import replace

import pytest

from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from tests.actors.sglang_served import CONFIG, FIRST, PROMPT, in_flight, started
from tests.actors.tiny import request

pytestmark = [pytest.mark.sglang, pytest.mark.nightly, pytest.mark.timeout(420)]
OLDEST_FIRST = {
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "disable_priority_preemption": True,
}


async def test_requests_of_the_oldest_lease_are_begun_first_and_none_that_runs_gives_way(tmp_path):
    FIRST.config.save_pretrained(tmp_path / "model")
    settings = CONFIG | {"server": OLDEST_FIRST | {"max_running_requests": 1}}
    engine = SglangEngine(tmp_path / "model", SglangEngineConfig(**settings), tmp_path / "engine.log")
    ended = []

    async def generate(name, version):
        await engine.generate(replace(request(name, PROMPT, new=20), lease_version=version))
        ended.append(name)

    try:
        await engine.start()
        await engine.load_weights(FIRST.state_dict(), 0)
        begun = started(engine, "begun", new=2000)
        begun.add_done_callback(lambda _: ended.append("begun"))
        await in_flight(engine, begun)
        async with asyncio.timeout(300), asyncio.TaskGroup() as group:
            for name, version in (("b", 5), ("c", 3), ("d", 4)):
                group.create_task(generate(name, version))
    finally:
        await engine.close()
    assert ended == ["begun", "c", "d", "b"]
