"""The elastic agent with small programs in place of the learner's ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bus.errors import ConfigError
from bus.server.nats_server import free_port
from launch.process.torchrun import run_world
from learner.config.parallel import WorldConfig

REPOSITORY = Path(__file__).parents[3]
AGENT = """
import json, sys
from launch.process.runtime import fail
from launch.process.torchrun import run_world
from learner.config.parallel import WorldConfig
from bus.errors import SluiceError
try:
    sys.exit(run_world(WorldConfig(**json.loads(sys.argv[1])), "test", ("-c", sys.argv[2])))
except SluiceError as error:
    fail(error)
"""
NOTE_STARTS = """
import os, pathlib, signal, sys, time
from launch.process.ranks import become_rank
become_rank()
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
pathlib.Path(f"rank{rank}-attempt{attempt}").touch()
def wait_for(*names):
    while not all(map(os.path.exists, names)):
        time.sleep(0.05)
"""


def start(directory: Path, program: str, **world: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", AGENT, json.dumps(world), NOTE_STARTS + program],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
    )


def run(directory: Path, program: str, **world: object) -> tuple[int, str]:
    agent = start(directory, program, **world)
    _, said = agent.communicate(timeout=200)
    return agent.returncode, said


def starts(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def wait_for(directory: Path, *names: str) -> None:
    deadline = time.monotonic() + 200
    while not {*names} <= {*starts(directory)}:
        assert time.monotonic() < deadline, starts(directory)
        time.sleep(0.05)


pytestmark = pytest.mark.slow


DIES_ONCE = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier(group=dist.new_group())
last = str(int(os.environ["WORLD_SIZE"]) - 1)
if (rank, attempt) == (last, "0"):
    wait_for(*(f"rank{n}-attempt0" for n in range(int(last))))
    os.kill(os.getpid(), signal.SIGKILL)
wait_for(f"rank{last}-attempt1")
dist.barrier()
"""
FAILS = "wait_for(f'rank0-attempt{attempt}', f'rank1-attempt{attempt}'); sys.exit(%d)"
ENDS_KINDLY = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(f"ready{rank}").touch()
time.sleep(600)
"""


def test_all_ranks_start_again_when_one_dies(tmp_path: Path):
    status, said = run(tmp_path, DIES_ONCE, processes=2)
    assert status == 0, said
    assert starts(tmp_path) == [f"rank{r}-attempt{a}" for r in (0, 1) for a in (0, 1)]


def test_a_world_that_keeps_dying_is_given_up(tmp_path: Path):
    status, said = run(tmp_path, FAILS % 7, processes=2, restarts=1)
    assert status == 1
    assert "more often than learner.world.restarts=1 times, last rank " in said
    # the other may have been ended meanwhile
    assert "rank 0 with status 7" in said or "rank 1 with status 7" in said
    assert starts(tmp_path) == [f"rank{r}-attempt{a}" for r in (0, 1) for a in (0, 1)]


def test_what_only_the_user_can_mend_is_not_tried_again(tmp_path: Path):
    status, _ = run(tmp_path, FAILS % 2, processes=2, restarts=3)
    assert status == 2
    assert starts(tmp_path) == ["rank0-attempt0", "rank1-attempt0"]


def test_a_signal_reaches_the_ranks_and_their_kind_end_is_the_worlds(tmp_path: Path):
    agent = start(tmp_path, ENDS_KINDLY, processes=2)
    wait_for(tmp_path, "ready0", "ready1")
    agent.send_signal(signal.SIGTERM)
    _, said = agent.communicate(timeout=60)
    assert agent.returncode == 0, said


def test_ranks_die_with_their_agent(tmp_path: Path):
    agent = start(tmp_path, "time.sleep(600)", processes=2)
    wait_for(tmp_path, "rank0-attempt0", "rank1-attempt0")
    ranks = psutil.Process(agent.pid).children()
    agent.kill()
    agent.communicate(timeout=30)
    _, alive = psutil.wait_procs(ranks, timeout=120)
    assert len(ranks) == 2
    assert not alive


@pytest.mark.nightly
def test_two_agents_make_one_world_whose_ranks_go_by_node(tmp_path: Path):
    master = f"127.0.0.1:{free_port('127.0.0.1')}"
    nodes = [
        start(tmp_path, DIES_ONCE, processes=2, nodes=2, node_rank=rank, master=master) for rank in (1, 0)
    ]
    for node in nodes:
        _, said = node.communicate(timeout=120)
        assert node.returncode == 0, said
    assert {f"rank{r}-attempt0" for r in range(4)} | {"rank3-attempt1"} <= {*starts(tmp_path)}


@pytest.mark.parametrize(
    ("world", "message"),
    [
        ({"node_rank": 0}, "needs --master HOST:PORT"),
        ({"node_rank": 0, "master": "head"}, "(got head)"),
        ({"master": "head:29400"}, "needs --node-rank on each, from 0 to 1 (got None)"),
        ({"node_rank": 2, "master": "head:29400"}, "(got 2)"),
        ({"node_rank": 0, "master": "no.such.host.invalid:29400"}, "cannot reach no.such.host.invalid"),
    ],
)
def test_a_world_that_says_not_where_it_is_is_refused(world: dict[str, object], message: str):
    with pytest.raises(ConfigError) as refused:
        run_world(WorldConfig(nodes=2, **world), "test", ())
    assert message in str(refused.value)
