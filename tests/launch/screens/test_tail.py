"""`launch tail` shows what real shards have stored, and leaves it as it is."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from bus.codec import Json, encode
from bus.connection import Bus
from bus.errors import ConfigError
from bus.messages import RunRecord
from bus.server.nats_server import NatsServer
from bus.streams.blob_store import put_only_blob
from bus.streams.publish import Publisher
from bus.trajectory import Trajectory, Turn
from launch.screens.completion_table import CompletionTable
from launch.screens.tail import TailOptions, lines, tail_run
from launch.settings.run_config import validate
from launch.trajectories.facts import RATIOS
from launch.trajectories.search import TrajectoryFilter
from launch.trajectories.sources import BusTrajectories, StoredTrajectories, TrajectorySource
from soak.link import HOST, faulty_link
from storage.model_files.packed_files import bundle
from storage.shard.server import Shard
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory
from tests.launch.dashboard.run_on_disk import make_run
from tests.storage.serving import make_shard, manifest, running, until

VERSION = 7


def stored(lease: int, sample: int, *, group_size: int = 2, **changes: object) -> Trajectory:
    """A trajectory of two turns whose tokens say "w0 w1 ... w9", the second turn by a newer version."""
    versions = [-1, -1, 3, 3, 3, -1, 4, 4, -1, -1]
    made = replace(
        make_trajectory(lease, sample, group_size=group_size, tokens=10),
        token_ids=np.arange(10, dtype=np.int32),
        policy_versions=np.array(versions, np.int32),
        loss_mask=np.array(versions) >= 0,
        behaviour_logprobs=np.zeros(10, np.float32),
        turns=(Turn(2, 5, "stop"), Turn(6, 8, "length", reward=0.5)),
        reward=1.0,
    )
    return replace(made, **changes)


@pytest.fixture
async def stores(bus: Bus, tmp_path: Path) -> AsyncIterator[list[ReplayStore]]:
    """The stores of both shards of a run that is announced with its policy and tokenizer, being served."""
    raw = Tokenizer(models.WordLevel({f"w{n} ": n for n in range(1000)}, unk_token="w0 "))
    raw.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "qwen3"}))
    files = await put_only_blob(bus, Publisher(bus), encode(bundle(tmp_path / "model")), "model")
    await bus.put("policy", replace(manifest(VERSION), model=files))
    config = validate({"run": "test", "replay": {"shards": 2}})
    await bus.put("run", RunRecord(name="test", config_json=config.model_dump_json()))
    with ExitStack() as stack:
        opened = [stack.enter_context(closing(ReplayStore.open(tmp_path / str(n)))) for n in range(2)]
        shards: list[Shard] = [make_shard(bus, store, n) for n, store in enumerate(opened)]
        async with running(shards[0].run), running(shards[1].run):
            yield opened


@pytest.fixture
def where(bus_server: NatsServer) -> TrajectorySource:
    config = validate({"run": "test", "bus": {"url": bus_server.url}})
    return BusTrajectories(lambda: config)


async def once(where: TrajectorySource, wanted: TailOptions) -> list[dict[str, Json]]:
    shown: list[dict[str, Json]] = []
    async with asyncio.timeout(60):
        await tail_run(where, wanted, shown.append, asyncio.Event())
    return shown


def append(stores: list[ReplayStore], lease: int, **changes: object) -> None:
    """Store the two trajectories of a group in its shard."""
    stores[lease % 2].append([stored(lease, sample, **changes) for sample in range(2)])


@pytest.mark.nats
async def test_newest_come_with_text_by_turn_mask_versions_and_staleness(
    stores: list[ReplayStore], where: TrajectorySource
):
    for lease in range(5):
        append(stores, lease)
    found = await once(where, TailOptions(3, once=True, token_ids=True))
    assert [one["trajectory_id"] for one in found] == ["g00000003.1", "g00000004.0", "g00000004.1"]
    last = found[-1]
    assert (last["oldest_version"], last["newest_version"], last["staleness"]) == (3, 4, VERSION - 3)
    assert (last["tokens"], last["masked_tokens"], last["end"], last["reward"]) == (10, 5, "completed", 1.0)
    assert [(p["by"], p["text"], p["masked_tokens"], p["versions"]) for p in last["parts"]] == [
        ("context", "w0 w1 ", 0, None),
        ("policy", "w2 w3 w4 ", 3, [3, 3]),
        ("context", "w5 ", 0, None),
        ("policy", "w6 w7 ", 2, [4, 4]),
        ("context", "w8 w9 ", 0, None),
    ]
    assert last["token_ids"] == list(range(10))
    assert json.loads(json.dumps(found)) == found
    text = lines(last)
    assert "=== g00000004.1 by solver on test: reward 1, completed, versions 3 to 4, staleness 4" in text
    assert "=== g00000004.1 by solver: reward 1" in lines(last | {"actor": ""})
    assert "--- policy, tokens 6 to 8, 2 in the mask, version 4, length, reward 0.5\nw6 w7 " in text


@pytest.mark.nats
async def test_it_follows_until_it_is_stopped(stores: list[ReplayStore], where: TrajectorySource):
    append(stores, 0)
    shown, stop = [], asyncio.Event()
    following = asyncio.create_task(tail_run(where, TailOptions(1), shown.append, stop))
    await until(lambda: len(shown) == 1 or following.done())
    append(stores, 1)
    append(stores, 2)
    await until(lambda: len(shown) == 5 or following.done())
    stop.set()
    async with asyncio.timeout(60):
        await following
    assert [one["lease_id"] for one in shown[:1]] == [0]
    assert sorted(one["lease_id"] for one in shown[1:]) == [1, 1, 2, 2]


@pytest.mark.nats
async def test_a_connection_that_is_cut_is_told_once_and_what_came_meanwhile_is_shown_after_it(
    stores: list[ReplayStore], server: NatsServer, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("launch.trajectories.sources.ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr("launch.screens.tail.POLL_S", 0.05)
    append(stores, 0)
    shown, stop, said = [], asyncio.Event(), []
    async with faulty_link(server.port) as link:
        config = validate({"run": "test", "bus": {"url": f"nats://{HOST}:{link.port}"}})
        following = asyncio.create_task(
            tail_run(BusTrajectories(lambda: config), TailOptions(1), shown.append, stop)
        )
        await until(lambda: len(shown) == 1 or following.done())
        link.flows.clear()
        append(stores, 1)
        await until(lambda: said.append(capsys.readouterr().err) or "does not answer" in "".join(said))
        link.flows.set()
        await until(lambda: len(shown) == 3 or following.done())
        stop.set()
        async with asyncio.timeout(60):
            await following
    assert [one["lease_id"] for one in shown] == [0, 1, 1]
    told = "".join(said) + capsys.readouterr().err
    assert told.count("launch: the run does not answer (") == 1
    assert "): its trajectories are shown when it does\n" in told


@pytest.mark.nats
async def test_one_lease_or_one_task_is_chosen(stores: list[ReplayStore], where: TrajectorySource):
    for lease in range(6):
        append(stores, lease, metadata={"id": f"task-{lease % 3}"})
    for wanted, leases in (({"lease": 1}, [1, 1]), ({"task": "task-2"}, [2, 2, 5, 5])):
        options = TailOptions(9, once=True, wanted=TrajectoryFilter(**wanted))
        assert [one["lease_id"] for one in await once(where, options)] == leases


@pytest.mark.nats
async def test_a_retired_group_is_named_and_left_out(
    stores: list[ReplayStore], where: TrajectorySource, capsys: pytest.CaptureFixture[str]
):
    append(stores, 0)
    append(stores, 2)
    stores[0].retire(stores[0].entries[0], None)
    found = await once(where, TailOptions(4, once=True))
    assert [one["lease_id"] for one in found] == [2, 2]
    assert "launch: 1 group is left out, first that of lease 0: " in capsys.readouterr().err


@pytest.mark.nats
async def test_nothing_is_taken_from_the_run(stores: list[ReplayStore], where: TrajectorySource, bus: Bus):
    append(stores, 0)
    streams = ("TASKS", "TRAJECTORIES", "OUTCOMES")

    async def counts() -> list[tuple[int, int]]:
        found = [(await bus.js.stream_info(bus.topology.stream(name))).state for name in streams]
        return [(one.last_seq, one.consumer_count) for one in found]

    before = await counts()
    assert len(await once(where, TailOptions(2, once=True))) == 2
    assert await counts() == before


def test_control_characters_of_a_text_do_not_reach_the_terminal():
    part = {"by": "context", "start": 0, "stop": 1, "text": "a\x1b[2Jb\n\tc"}
    shown = lines(
        {
            "trajectory_id": "g0", "agent": "solver", "actor": "a", "reward": None, "end": "completed",
            "label": None, "advantage": None, **dict.fromkeys(RATIOS), "reward_components": {},
            "training": "not trained yet",
            "oldest_version": None, "newest_version": None, "staleness": None, "parts": [part],
        }
    )  # fmt: skip
    assert "\x1b" not in shown
    assert "[2Jb\n\tc" in shown
    assert "reward due" in shown


async def test_a_finished_run_is_read_in_its_directory_with_all_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = make_run(tmp_path, "done", steps=5)
    source = StoredTrajectories(run)
    shown: list[dict[str, Json]] = []
    async with asyncio.timeout(60):  # it ends by itself: the run is over
        await tail_run(source, TailOptions(2, wanted=TrajectoryFilter(step=4)), shown.append, asyncio.Event())
    assert [one["trajectory_id"] for one in shown] == ["g00000007.0", "g00000007.1"]
    for recent, below in ((2, 7), (3, 7), (4, 6)):
        options = TailOptions(recent, once=True, wanted=TrajectoryFilter(below=8))
        await tail_run(source, options, shown.append, asyncio.Event())
        assert capsys.readouterr().err.endswith(f": --below {below}\n")
    await tail_run(
        source, TailOptions(2, once=True, wanted=TrajectoryFilter(version=99)), print, asyncio.Event()
    )
    assert capsys.readouterr() == ("", "launch: none of 12 groups has such a trajectory\n")
    with pytest.raises(ConfigError, match="no trajectory ends as 'stop': it is one of completed, length, "):
        TrajectoryFilter(end="stop")
    for wanted in ({"step": -1}, {"version": 2**80}, {"lease": -1}, {"below": 2**80}):
        with pytest.raises(ConfigError, match="it is a whole number from 0 to"):
            TrajectoryFilter(**wanted)
    last = shown[1]
    assert (last["label"], last["advantage"], last["steps"]) == ("label 2", 0.5, {"4": 1.0})
    assert [last[name] for name in RATIOS] == [2.75, 0.25, 4.0, 0.125]
    said = lines(last).splitlines()[1]
    assert said.startswith(
        "trained in step 4 with weight 1; label label 2; advantage 0.5; importance ratio 2.75; "
    )
    assert said.endswith("; truncated fraction 0.125; part format 1")


def test_the_table_has_a_line_each_of_one_width():
    found = {
        "trajectory_id": "g00000007.1", "oldest_version": 3, "newest_version": 4, "reward": 1.0, "tokens": 99,
        "advantage": -0.70710678, "end": "turn_limit", "reward_components": {"right": 1.0, "tidy": 0.25},
        "parts": [
            {"by": "context", "text": "<|user|>sort\n4 1 3" + "x" * 99 + "now<|assistant|>"},
            {"by": "policy", "text": "\x1b[2J\u4e00" * 60 + "END"},
        ],
    }  # fmt: skip
    table = CompletionTable(150)
    head, line = table(found).split("\n")
    assert head.split()[:3] == ["trajectory", "version", "reward"]
    assert head.split()[-3:] == ["parts", "prompt", "answer"]
    assert line.startswith("g00000007.1  3-4       1        -0.7071   99     turn_limit right=1 tidy=0.25")
    assert "<|user|>sort" in line
    assert "\x1b" not in line
    assert line.endswith("END")
    assert cell_len(line) <= 150
    assert "\n" not in table(found)  # the head stands once
    narrow = CompletionTable(80)
    for line in (*narrow(found).split("\n"), narrow(found | {"reward_components": {}})):
        assert cell_len(line) <= 80
    assert narrow(found).startswith("g00000007.1  1        -0.7071")
    assert "parts" not in CompletionTable(150)(found | {"reward_components": {}})
