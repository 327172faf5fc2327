"""The cost model of a publication, and the processes that it is compared with."""

import json
from pathlib import Path

import pytest

from benchmarks.scale_model import Machine, Work, parts_of, received_s, version_s
from tests.e2e.commands import Command

LINK = 1000.0


def test_one_host_takes_as_long_as_its_link():
    assert received_s(Machine(LINK), 1, 10_000, 10) == pytest.approx(10)


def test_two_hosts_share_one_copy_of_the_learner():
    """The bytes would take 20 s if both had them from the learner; each sends half to the other instead."""
    assert 10 < received_s(Machine(LINK), 2, 10_000, 100) < 17


def test_where_an_event_loop_is_slower_than_the_link_it_sets_the_pace():
    slow = Machine(1e9, sending_s=1 / LINK)
    assert received_s(slow, 1, 10_000, 10) == pytest.approx(10, rel=0.01)


def test_a_learner_that_answers_slowly_is_waited_for():
    """Each of ten hosts asks at least thrice for ten parts, of which it gets four at a time."""
    assert received_s(Machine(1e9, question_s=1.0), 10, 10_000, 10) >= 30


def test_the_stages_of_a_version_add_up():
    machine, work = Machine(12.5e9), Work()
    found = version_s(machine, work, 2, 16_000_000_000)
    assert found["announced_s"] == pytest.approx(16 / 17 + 0.112 / 4)
    assert found["serving_s"] == pytest.approx(found["received_s"] + 1.6 + 16 / 8 / 156)


@pytest.mark.parametrize(
    ("size_bytes", "parts"), [(1, 1), (8 << 20, 1), (9 << 20, 2), (16 << 30, 512), (17 << 30, 272)]
)
def test_blobs_have_the_parts_of_the_product(size_bytes, parts):
    assert parts_of(size_bytes) == parts


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_host_gets_each_version_and_the_learner_sends_about_one_copy(tmp_path: Path):
    """By the command, whose hosts have to find `benchmarks` from any directory."""
    scale = ("--hosts", "4", "--size-mb", "1", "--link-kb-s", "2000", "--versions", "1", "--json")
    command = Command(tmp_path, "bench", "scale", *scale)
    try:
        assert command.wait(150) == 0, command.said()
    finally:
        command.kill()
    found = json.loads(command.said().splitlines()[-1])["versions"]
    assert [version["parts"] for version in found] == [17, 2]
    assert all(1 <= version["copies"] <= 1.5 for version in found)
    assert all(version["model_s"] > 0 for version in found)
