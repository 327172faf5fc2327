"""`launch profile` of a learner that trains: steps of its real loop are traced, and it goes on."""

import asyncio
import gzip
import json

import pytest

from bus.config import BusConfig
from bus.errors import BusAwayError, ConfigError
from launch.operations.live_run import take_profile
from launch.settings.run_config import RunConfig
from learner.metrics.profiler import RankProfile
from learner.run.profiling import Profiling, _Asked
from tests.learner.mini_run import mini_run
from tests.storage.serving import until

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.usefixtures("in_process")]


@pytest.fixture
def asked(monkeypatch) -> asyncio.Event:
    """Set once a request has got to the learner."""
    heard, answer = asyncio.Event(), Profiling._answer

    async def noted(profiling, request):
        heard.set()
        return await answer(profiling, request)

    monkeypatch.setattr(Profiling, "_answer", noted)
    return heard


async def test_next_steps_of_a_live_learner_are_traced_and_it_trains_on(bus, bus_server, asked, tmp_path):
    where = RunConfig(run=bus.topology.run, bus=BusConfig(url=bus_server.url))
    stop = asyncio.Event()
    with pytest.raises(BusAwayError, match=r"the learner of run .* nobody serves .*; nothing was asked"):
        await take_profile(where, 2, 60.0, stop)
    async with mini_run(bus, tmp_path) as run:
        run.hold(after_step=1)
        learner = asyncio.create_task(run.train(steps=6))
        await until(lambda: 1 in run.steps(), seconds=60)
        asking = asyncio.create_task(take_profile(where, 2, 60.0, stop))
        await asyncio.wait_for(asked.wait(), 60)
        run.release()
        found = await asking
        assert (await learner).step == 6
    first = int(found.lines[0].split()[4])
    directory = tmp_path / f"profiles/steps-{first}-{first + 1}"
    assert found.directory == str(directory)
    assert found.lines[0].startswith(f"2 steps from step {first} on took ")
    text = "\n".join(found.lines)
    assert (directory / "report.txt").read_text() == text + "\n"
    for part in ("updates", "the optimizer, of the updates", "waiting for the batch"):
        assert f"%  {part}\n" in text
    assert "rank 0: the CPU ran no operator of torch in " in text
    assert "%  aten::" in text
    with gzip.open(directory / "rank-0.trace.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert any("Backward" in name for name in names), "the whole step is traced"


async def test_a_learner_that_ends_answers_with_what_it_has_and_takes_one_profile_at_a_time(
    bus, server, tmp_path
):
    where = RunConfig(run=bus.topology.run, bus=BusConfig(url=server.url))
    stop = asyncio.Event()
    async with mini_run(bus, tmp_path) as run:
        run.hold(after_step=1)
        learner = asyncio.create_task(run.train(steps=4))
        await until(lambda: 1 in run.steps(), seconds=60)
        asking = [asyncio.create_task(take_profile(where, 90, 60.0, stop)) for _ in range(2)]
        [refused], [pending] = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(ConfigError, match="a profile of 90 steps is being taken: ask again after it"):
            await refused
        run.release()
        found = await pending
        assert (await learner).stage == "done"
    assert found.lines[0].split()[0] in ("1", "2", "3"), "the steps that were left"


async def test_a_report_that_cannot_be_written_is_said_and_the_learner_goes_on(tmp_path):
    class World:
        async def call(self, _method, directory):
            return [RankProfile(1.0, 0.5, on_gpu=False, top=())]  # and the directory is gone

    profiling = Profiling(None, World(), tmp_path)
    answer = asyncio.get_running_loop().create_future()
    profiling._asked = _Asked(1, answer, 1, [{}])
    await profiling.end()
    problem, told, *_ = answer.result().lines
    assert problem.startswith(f"the report cannot be written into {tmp_path}/profiles/steps-1-1: ")
    assert told.startswith("1 steps from step 1 on took ")
