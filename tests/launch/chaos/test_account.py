"""The account of a run that has ended, and what keeps `launch bench overlap` from having it."""

import asyncio
import json
import re
import time
from contextlib import closing

import pytest

from benchmarks.overlap import WELL, Plan, accounted
from benchmarks.overlap_settings import defaults, settings
from bus.errors import SluiceError
from learner.progress import lineage
from soak.trajectory_account import account
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger import Ledger
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory

GROUPS, SAMPLES = 3, 2


@pytest.fixture
def run(tmp_path):
    """Return a run that was trained a step of three groups, and has ended."""
    run = RunDirectory(tmp_path, "ended")
    progress = {"step": 1, "policy_version": 1, "max_staleness_seen": 0}
    progress["trajectories_trained"] = GROUPS * SAMPLES
    (run.path / "progress.json").write_text(json.dumps(progress))
    with closing(Ledger.open(run.ledger)) as ledger:
        leases = ledger.issue(GROUPS, 0)
        for lease in leases:
            ledger.store(lease)
        ledger.lease(1, leases)
    step = lineage.TrainedStep(step=1, policy_version=1, incarnation="learner-1", leases=tuple(leases))
    lineage.record(run.path / "lineage.jsonl", step)
    with closing(ReplayStore.open(run.replay(0))) as store:
        store.append([make_trajectory(lease_id=lease, sample=n) for lease in leases for n in range(SAMPLES)])
    return run


@pytest.fixture
def config(run, tmp_path):
    layers = {"admission": {"samples_per_prompt": SAMPLES}, "replay": {"shards": 1}}
    return settings(layers, defaults("tiny", tmp_path, devices={}), "tiny", prompt_tokens=16)


async def test_an_account_compares_what_the_parts_left_on_the_disk(config, run):
    counts, ended = await accounted(config, run, Plan(steps=1, rounds=1), asyncio.Event())
    assert ended == WELL
    assert (counts["groups_issued"], counts["trajectories_trained"]) == (GROUPS, GROUPS * SAMPLES)
    assert (counts["lost"], counts["trained_but_not_in_ledger"], counts["given_but_not_trained"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("progress.json", "no account: .*progress.json is missing"),
        ("ledger", "no account: .*ledger.sqlite is missing"),
        ("lineage.jsonl", "no account: of 0 groups that .* was trained on its replay has none"),
    ],
)
async def test_what_an_account_lacks_is_said_in_its_place(config, run, lacks, said):
    (run.ledger if lacks == "ledger" else run.path / lacks).unlink()
    counts, ended = await accounted(config, run, Plan(steps=1, rounds=1), asyncio.Event())
    assert counts is None
    assert re.fullmatch(said + ".*", ended), ended


async def test_no_account_is_begun_where_little_of_the_limit_is_left_or_the_bench_was_stopped(config, run):
    almost_over = Plan(steps=1, rounds=1, limit_s=10_000.0, began=time.monotonic() - 9_996.0)
    _, ended = await accounted(config, run, almost_over, asyncio.Event())
    assert ended == "no account: the limit of 10000 s leaves no time for it"
    stop = asyncio.Event()
    stop.set()
    assert await accounted(config, run, Plan(steps=1, rounds=1), stop) == (None, "no account: stopped")


def test_an_account_that_was_begun_is_ended_before_the_next_group(run):
    read = []

    def go_on():
        read.append(1)
        if len(read) == 2:
            raise SluiceError("stopped")

    with pytest.raises(SluiceError, match="stopped"):
        account(run, shards=1, samples=SAMPLES, max_staleness=2, go_on=go_on)
    assert len(read) == 2
