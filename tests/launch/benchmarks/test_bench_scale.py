"""The cost model of a publication, and the processes that it is compared with."""

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.scale_model import Machine, Wait, Work, part_bytes_of, received_s, version_s
from storage.weights.part_tracker import PartTracker
from tests.e2e.commands import Command

LINK = 1000.0


def test_one_host_takes_as_long_as_its_link():
    assert received_s(Machine(LINK), 1, 10_000, 1000) == pytest.approx(10)


def test_two_hosts_share_one_copy_of_the_learner():
    """The bytes would take 20 s if both had them from the learner; each sends half to the other instead."""
    assert 10 < received_s(Machine(LINK), 2, 10_000, 100) < 17


def test_where_an_event_loop_is_slower_than_the_link_it_sets_the_pace():
    slow = Machine(1e9, sending_s=1 / LINK)
    assert received_s(slow, 1, 10_000, 1000) == pytest.approx(10, rel=0.01)


def test_a_learner_that_answers_slowly_is_waited_for():
    """Each of ten hosts asks at least thrice for ten parts, of which it gets four at a time."""
    assert received_s(Machine(1e9, question_s=1.0), 10, 10_000, 1000) >= 30


def test_a_last_part_is_as_long_as_what_is_left():
    assert received_s(Machine(LINK), 1, 2_100, 1000) == pytest.approx(2.1)


def test_a_server_sends_pieces_of_each_part_in_turn():
    """A host takes four parts at a time. Where they came evenly, all would come at the last moment, and the
    host that waits for them could not begin to fetch some of them before."""
    alone = received_s(Machine(LINK), 1, 4_000, 1000)
    assert alone == pytest.approx(4)
    assert received_s(Machine(LINK), 2, 4_000, 1000) < 2 * alone


def test_each_part_takes_its_time_of_an_event_loop():
    machine = Machine(1e9, served_part_s=0.5, fetched_part_s=2.0)
    assert received_s(machine, 1, 10_000, 1000) == pytest.approx(20, rel=0.05)
    assert received_s(replace(machine, served_part_s=3.0), 1, 10_000, 1000) == pytest.approx(30, rel=0.05)


def test_ranks_send_at_the_same_time_what_one_host_takes_from_all_of_them():
    """With one host they are no faster; a learner that is slow to send is as many times as fast."""
    assert received_s(Machine(LINK, ranks=4), 1, 40_000, 1000) == pytest.approx(40)
    slow = Machine(1e9, sending_s=1 / LINK, ranks=4)
    assert received_s(slow, 1, 40_000, 1000) == pytest.approx(10, rel=0.01)
    on_a_link = Machine(LINK, ranks=4, ranks_of_a_host=4)
    assert received_s(on_a_link, 1, 40_000, 1000) == pytest.approx(40, rel=0.1)


def test_a_question_takes_what_the_tracker_takes_if_that_is_asked_for(monkeypatch):
    sources = PartTracker.sources

    def slowly(*asked):
        began_s = time.thread_time()
        while time.thread_time() < began_s + 0.002:
            pass
        return sources(*asked)

    monkeypatch.setattr(PartTracker, "sources", slowly)
    fast = Machine(1e9)
    assert received_s(fast, 1, 10_000, 1000) < 0.002
    assert received_s(replace(fast, times_tracker=True), 1, 10_000, 1000) >= 0.006


def test_the_stages_of_a_version_add_up():
    machine, work = Machine(12.5e9), Work(apply_bytes_per_s=1e10, load_bytes_per_s=2e11)
    found = version_s(machine, work, 2, 1_600_000_000)
    assert found["announced_s"] == pytest.approx(1.6 / 17 + 0.0112 / 4)
    assert found["serving_s"] == pytest.approx(found["received_s"] + 0.16 + 1.6 / 8 / 200)
    of_two_hosts = version_s(replace(machine, ranks=16, ranks_of_a_host=8), work, 2, 1_600_000_000)
    assert of_two_hosts["announced_s"] == pytest.approx(found["announced_s"] / 2)


def test_training_waits_for_what_each_rank_compares_and_sends():
    wait = Wait(passes=5, memory_bytes_per_s=5e11, changed_fraction=0.01, gather_bytes_per_s=1e10,
                to_host_bytes_per_s=1e9)  # fmt: skip
    changes = 1e9 / 2 * 0.01 * 10  # of a share of 1 GB
    alone = wait.seconds(Machine(1e9), 1_000_000_000)
    assert alone == pytest.approx(0.01 + changes / 1e9)
    eight = wait.seconds(Machine(1e9, ranks=8, ranks_of_a_host=8), 8_000_000_000)
    assert eight == pytest.approx(alone + changes * 7 / 8 / 1e10)
    on_two_hosts = wait.seconds(Machine(1e9, ranks=16, ranks_of_a_host=8), 16_000_000_000)
    assert on_two_hosts == pytest.approx(alone + changes * 15 / 16 / 1e10 + 8 * changes / 2 / 1e9)


@pytest.mark.parametrize(
    ("size_bytes", "blocks"),
    [(1, 1), (8 << 20, 1), (9 << 20, 1), (4 << 30, 1), (4 << 30 | 1, 2), (17 << 30, 8)],
)
def test_blobs_have_parts_of_the_size_of_the_product(size_bytes, blocks):
    assert part_bytes_of(size_bytes) == blocks << 23


@pytest.mark.nats
@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_every_host_gets_each_version_and_the_learner_sends_about_one_copy(tmp_path: Path):
    """By the command, whose hosts have to find `benchmarks` from any directory."""
    scale = ("--hosts", "4", "--ranks", "2", "--size-mb", "1", "--link-kb-s", "4000", "--slower", "2")
    command = Command(tmp_path, "bench", "scale", *scale, "--versions", "1", "--rounds", "1", "--json")
    try:
        assert command.wait(150) == 0, command.said()
    finally:
        command.kill()
    said = json.loads(command.said().splitlines()[-1])
    assert [version["parts_of_a_rank"] for version in said["versions"]] == [9, 1]
    assert all(1 <= copies <= 1.5 for version in said["versions"] for copies in version["copies"])
    assert all(version["model_s"] > 0 for version in said["versions"])
    assert all(seconds > 0 for name, seconds in said["loops"].items() if name.endswith("ing_s"))
    assert said["predicted"]["8B, 100 Gb/s"]["received_s"] > 0


@pytest.mark.nats
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_hosts_end_with_a_benchmark_that_is_killed(tmp_path: Path):
    scale = ("--hosts", "3", "--ranks", "1", "--size-mb", "100", "--link-kb-s", "1000", "--slower", "1")
    command = Command(tmp_path, "bench", "scale", *scale, "--versions", "1", "--rounds", "1")
    bench, below = psutil.Process(command.process.pid), list[psutil.Process]()
    try:
        deadline = time.monotonic() + 200
        while len(below) - len(bench.children()) < 3:  # the hosts are grandchildren
            assert time.monotonic() < deadline, command.said()
            time.sleep(0.1)
            below = bench.children(recursive=True)
        bench.kill()
        _, alive = psutil.wait_procs(below, timeout=60)
        assert alive == []
    finally:
        for one in below:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        command.kill()
