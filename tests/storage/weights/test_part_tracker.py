"""Where hosts are sent for parts of a blob."""

import pytest

from bus.codec import decode, encode
from bus.errors import BusError, SchemaError
from bus.weight_requests import BlobAccess, PartFailed, PartsAsked
from storage.weights import part_tracker
from storage.weights.part_tracker import ORIGIN, PartTracker

PARTS = 3
HERE, THERE = "http://10.0.0.", "http://10.9.9."


class Run:
    """Hosts that ask one tracker, by a clock of their own."""

    def __init__(self):
        self.now_s = 0.0
        self.tracker = PartTracker(lambda: self.now_s)
        self.part_bytes = 0

    def ask(self, host, have, *failed):
        """Where the host is told to get each part."""
        asked = PartsAsked(blob="b", host=host, url=host, have=bytes(have), failed=failed)
        return {source.part: source.url for source in self.tracker.sources(asked, self.part_bytes)}


@pytest.fixture
def run():
    return Run()


def test_each_part_is_sent_once_by_the_learner_and_then_by_who_has_it(run):
    assert run.ask(HERE + "1", [0, 0, 0]) == dict.fromkeys(range(PARTS), ORIGIN)
    assert run.ask(HERE + "2", [0, 0, 0]) == {}
    assert run.ask(HERE + "1", [1, 2, 2]) == {}
    assert run.ask(HERE + "2", [0, 0, 0]) == {0: HERE + "1"}


def test_a_part_goes_once_to_a_far_place_and_from_near_hosts_to_others_there(run):
    run.ask(HERE + "1", [1, 1, 1])
    assert run.ask(THERE + "1", [0, 0, 0]) == dict.fromkeys(range(PARTS), HERE + "1")
    assert run.ask(THERE + "2", [0, 0, 0]) == {}
    assert run.ask(HERE + "2", [0, 1, 1]) == {0: HERE + "1"}, "which is near and has it"
    run.ask(THERE + "1", [1, 2, 2])
    assert run.ask(THERE + "2", [0, 0, 0]) == {0: THERE + "1"}


def test_what_a_host_fetches_is_told_to_another_if_it_falls_silent_or_is_slow(run):
    run.ask(HERE + "1", [0, 1, 1])
    run.now_s = part_tracker.SILENT_S + 0.1
    assert run.ask(HERE + "2", [0, 1, 1]) == {0: ORIGIN}
    while run.now_s < 3 * part_tracker.SLOW_S:
        run.now_s += 1
        run.ask(HERE + "2", [2, 1, 1])
    assert run.ask(HERE + "3", [0, 1, 1]) == {0: ORIGIN}


def test_a_large_part_is_not_told_to_another_as_long_as_its_host_may_take(run):
    run.part_bytes = 20 * part_tracker.SLOWEST_BYTES_PER_S
    run.ask(HERE + "1", [0, 1, 1])
    told = {}
    while not told and run.now_s < 100:
        run.now_s += 1
        run.ask(HERE + "1", [2, 1, 1])
        told = run.ask(HERE + "2", [0, 1, 1])
    assert told == {0: ORIGIN}
    assert run.now_s == part_tracker.SLOW_S + 20


def test_a_host_that_lacks_nothing_costs_no_look_at_the_others(run):
    class NeverRead:
        heard_s = 0.0

    run.ask(HERE + "1", [1, 1, 1])
    run.tracker._hosts["b", PARTS]["another"] = NeverRead()
    assert run.ask(HERE + "1", [1, 1, 1]) == {}
    with pytest.raises(AttributeError):
        run.ask(HERE + "1", [0, 1, 1])


def test_a_server_is_avoided_by_whom_it_failed_and_by_all_when_two_accuse_it(run):
    run.ask(HERE + "1", [1, 1, 1])
    lie = PartFailed(part=0, url=HERE + "1", is_damaged=True)
    assert run.ask(HERE + "2", [0, 0, 0]) == dict.fromkeys(range(PARTS), HERE + "1")
    assert run.ask(HERE + "2", [0, 1, 1], lie) == {0: ORIGIN}
    assert run.ask(HERE + "3", [1, 0, 1]).keys() == {1}
    run.ask(HERE + "3", [1, 0, 1], lie)
    assert HERE + "1" not in run.ask(HERE + "4", [1, 1, 0]).values()
    run.now_s = part_tracker.AVOIDED_S + 1
    run.ask(HERE + "1", [1, 1, 1])
    assert run.ask(HERE + "5", [1, 1, 0]) == {2: HERE + "1"}


def test_a_host_that_many_read_from_is_given_to_no_more_until_others_have_the_part(run):
    run.ask(HERE + "0", [1, 1, 1])
    readers = [HERE + str(n) for n in range(1, part_tracker.MOST_READERS + 1)]
    assert all(run.ask(reader, [0, 1, 1]) == {0: HERE + "0"} for reader in readers)
    assert run.ask(HERE + "99", [0, 1, 1]) == {}
    run.ask(readers[0], [1, 1, 1])
    assert run.ask(HERE + "99", [0, 1, 1]) == {0: readers[0]}


def test_the_learner_sends_few_parts_at_a_time_so_that_hosts_soon_have_some_for_each_other(run, monkeypatch):
    monkeypatch.setattr(part_tracker, "MOST_READERS", 2)
    assert len(run.ask(HERE + "1", [0, 0, 0])) == 2
    assert run.ask(HERE + "2", [0, 0, 0]) == {}
    run.now_s = part_tracker.BUSY_S
    assert set(run.ask(HERE + "2", [0, 0, 0]).values()) == {ORIGIN}, "who is slow holds up nobody"


def test_a_host_that_was_not_heard_for_long_is_nobodys_source(run):
    run.ask(HERE + "1", [1, 1, 1])
    run.now_s = part_tracker.SERVED_S + 1
    assert run.ask(HERE + "2", [0, 1, 1]) == {0: ORIGIN}


def test_a_flood_of_names_and_of_accusations_fills_no_memory(run, monkeypatch):
    monkeypatch.setattr(part_tracker, "MOST_HOSTS", 2)
    run.ask(HERE + "1", [0])
    run.ask(HERE + "2", [0])
    with pytest.raises(BusError, match="2 hosts ask for weights already"):
        run.ask(HERE + "3", [0])
    run.now_s = part_tracker.SERVED_S + 1
    lies = [PartFailed(part=0, url=f"{THERE}{n}", is_damaged=True) for n in range(9)]
    assert run.ask(HERE + "3", [0], *lies) == {0: ORIGIN}
    assert not run.tracker._accusers


@pytest.mark.parametrize(
    "said",
    [
        {"have": bytes(513)},
        {"host": "h" * (16 << 10)},
        {"access": BlobAccess(token="t", certificate="c" * (16 << 10))},
    ],
)
def test_what_no_host_says_is_refused_before_anything_is_kept(said):
    usual = {"blob": "b", "host": "h", "url": "http://10.0.0.1:1", "have": bytes(512)}
    decode(encode(PartsAsked(**usual)), PartsAsked)
    with pytest.raises(
        SchemaError, match="a host says at most 512 parts, as many failures and 16384 characters"
    ):
        decode(encode(PartsAsked(**usual | said)), PartsAsked)
