"""A learner that waits for long notes for what and since when, and takes the note back."""

import asyncio
import json

import pytest

from bus.connection.status import Activity
from learner.run import next_batch
from learner.run.next_batch import LongWait
from tests.launch.messages import Clock
from tests.learner.mini_run import mini_run
from tests.storage.serving import until

BATCH = Activity("waiting for the batch", wait="batch", reason="3 of 4 groups are stored")


def test_a_wait_is_a_long_one_after_a_minute_and_begins_anew_with_each_step(tmp_path):
    clock = Clock()
    wait = LongWait(tmp_path / "waiting.json", clock=clock)
    assert wait.look(BATCH, 0, 1) is None
    clock.now_s += 59
    assert wait.look(BATCH, 0, 1) is None
    clock.now_s += 1
    said = "waiting for the batch: 3 of 4 groups are stored"
    assert wait.look(BATCH, 0, 1) == {"waits_for": said, "since_s": 100.0}
    assert wait.look(BATCH, 0, 2) is None  # it trained a step between two looks
    clock.now_s += 90
    assert wait.look(Activity("training step 3"), 0, 2) is None
    assert wait.look(BATCH, 0, 2) is None


@pytest.mark.slow
@pytest.mark.nats
@pytest.mark.usefixtures("in_process")
async def test_a_learner_without_groups_says_so_in_its_directory_until_they_come(bus, tmp_path, monkeypatch):
    monkeypatch.setattr(next_batch, "WAITS_AFTER_S", 0.3)
    monkeypatch.setattr(next_batch, "PERIOD_S", 0.05)
    note = tmp_path / "waiting.json"
    async with mini_run(bus, tmp_path) as run:
        run.hold(after_step=2)
        learner = asyncio.create_task(run.train())
        await until(lambda: 2 in run.steps() and note.exists(), seconds=60)
        assert json.loads(note.read_text())["waits_for"].startswith("waiting for the batch")
        run.release()
        assert (await learner).stage == "done"
    assert not note.exists()
