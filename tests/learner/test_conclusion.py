"""The end of a run: what is saved as done has been exported."""

import asyncio
from dataclasses import replace

import pytest

from bus.config import ColocationConfig
from bus.messages import PolicyManifest
from learner import service
from learner.colocation import Device
from tests.learner.mini_run import mini_run

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.usefixtures("in_process")]


async def test_a_learner_stopped_while_it_waits_for_the_device_to_export_is_taken_up_again(
    bus, tmp_path, monkeypatch
):
    yielded = Device._yielded

    async with mini_run(bus, tmp_path) as run:

        async def last_one_comes_too_late(device: Device, stop: asyncio.Event) -> bool:
            if 4 in run.steps():
                stop.set()
            return await yielded(device, stop)

        settings = replace(run.settings(), colocation=ColocationConfig(enabled=True))
        with monkeypatch.context() as patch:
            patch.setattr(Device, "_yielded", last_one_comes_too_late)
            async with asyncio.timeout(60):
                stopped = await service.run(bus, settings, run.demonstrations, asyncio.Event())
        assert stopped is not None
        assert (stopped.stage, stopped.step) == ("rl", 4)
        assert not settings.export.exists()
        async with asyncio.timeout(60):
            again = await service.run(bus, settings, run.demonstrations, asyncio.Event())
        assert again is not None
        assert (again.stage, again.step) == ("done", 4)
        assert (settings.export / "config.json").is_file()
        published = await bus.get("policy", PolicyManifest)
        assert published is not None
        assert published[0].stage == "done"
