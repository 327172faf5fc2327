"""`launch reward`: from a file or a pipe onto a real bus."""

import asyncio
import json
import os
import platform
import sys
from pathlib import Path

import pytest

from bus.codec import decode
from bus.errors import ConfigError
from bus.messages import RewardGiven, RunRecord
from launch.cli.main import main
from launch.operations.give_rewards import give_rewards
from launch.settings.run_config import RunConfig, resolve
from storage.account.records import GIVEN, read_records

pytestmark = pytest.mark.nats


@pytest.fixture
async def where(bus, bus_server, tmp_path) -> RunConfig:
    await bus.put("run", RunRecord(name="test", config_json=json.dumps({"replay": {"shards": 2}})))
    return resolve({"run": "test", "bus": {"url": bus_server.url}, "directory": str(tmp_path)})


def line(name: str, reward: float) -> str:
    return json.dumps({"trajectory_id": name, "reward": reward}) + "\n"


async def given(bus, shard: int, count: int) -> list[RewardGiven]:
    """The rewards that the shard will find, once there are so many."""
    name, subject = bus.topology.stream("OUTCOMES"), bus.subject("outcomes", "rewards", shard)
    arrived: list = []
    async with asyncio.timeout(60):
        while len(arrived) < count:
            state = (await bus.js.stream_info(name)).state
            raws = [await bus.js.get_msg(name, n) for n in range(max(1, state.first_seq), state.last_seq + 1)]
            arrived = [decode(raw.data, RewardGiven) for raw in raws if raw.subject == subject]
    return arrived


async def test_rewards_of_a_file_reach_their_shards(bus, where, tmp_path):
    rewards = tmp_path / "rewards.jsonl"
    rewards.write_text(line("g00000000.0", 0.5) + "oops\n" + line("g00000003.1", 1))
    found = await give_rewards(where, rewards, asyncio.Event())
    assert (found.taken, len(found.refused)) == (2, 1)
    assert found.refused[0].startswith("line 2: not JSON")
    [even], [odd] = await given(bus, 0, 1), await given(bus, 1, 1)
    assert (even.trajectory_id, even.reward, odd.trajectory_id, odd.reward) == (
        "g00000000.0", 0.5, "g00000003.1", 1.0
    )  # fmt: skip
    assert even.source == f"launch reward {rewards} {platform.node()}-{os.getpid()}"
    [file] = read_records(tmp_path / "test" / GIVEN)
    assert file.owner.writer == even.source
    assert {one.copy[:2]: one.copy.reward for one in file.records} == {(0, 0): 0.5, (3, 1): 1.0}


async def test_lines_of_a_pipe_are_given_as_they_come_until_it_is_stopped(bus, where, monkeypatch):
    receiving, sending = os.pipe()
    with open(receiving) as stdin, open(sending, "w", buffering=1) as pipe:  # noqa: ASYNC230, PTH123 - a pipe
        monkeypatch.setattr(sys, "stdin", stdin)
        stop = asyncio.Event()
        giving = asyncio.create_task(give_rewards(where, Path("-"), stop))
        for n in range(3):
            pipe.write(line(f"g00000000.{n}", n))
            assert len(await given(bus, 0, n + 1)) == n + 1
        stop.set()
        async with asyncio.timeout(60):
            assert (await giving).taken == 3


async def test_file_and_run_that_are_not_there_are_named(bus, bus_server, tmp_path):
    where = resolve({"run": "test", "bus": {"url": bus_server.url}})
    with pytest.raises(ConfigError, match=r"cannot read the rewards in .*absent\.jsonl: No such file"):
        await give_rewards(where, tmp_path / "absent.jsonl", asyncio.Event())
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="there is no run 'test' on this bus"):
        await give_rewards(where, tmp_path / "empty.jsonl", asyncio.Event())


def test_command_names_what_it_cannot_read(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["reward", "absent.jsonl", "--run", "test"])
    assert ended.value.code == 2
    assert "cannot read the rewards in absent.jsonl" in capsys.readouterr().err
