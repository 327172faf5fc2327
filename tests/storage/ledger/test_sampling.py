"""Which groups a step takes: oldest first, within the staleness bound, without dead ends."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from storage.ledger.sampling import Candidate, Choice, StepRequest, expired, oldest_first


def groups(*versions_and_ids: tuple[int, int]) -> list[Candidate]:
    return [Candidate(version, lease_id) for version, lease_id in versions_and_ids]


def choose(stored, rolling_out, *, count: int, at: int, staleness: int) -> Choice:
    question = StepRequest(groups=count, train_version=at, max_staleness=staleness)
    return oldest_first(groups(*stored), groups(*rolling_out), question)


def test_oldest_groups_are_taken_first():
    choice = choose([(1, 7), (0, 5), (0, 2), (1, 1)], [], count=3, at=1, staleness=4)
    assert choice == Choice(leases=(2, 5, 1))


def test_step_waits_until_enough_groups_are_stored():
    choice = choose([(0, 0)], [(0, 1), (0, 2)], count=2, at=0, staleness=4)
    assert choice == Choice(waiting_for="1 of 2 groups are stored, 2 rolling out", blockers=(1,))


def test_straggler_is_passed_until_the_last_step_before_its_deadline():
    for version in (3, 4):  # it can still be trained at version 5
        assert choose([(3, 1), (3, 2)], [(3, 0)], count=1, at=version, staleness=2).leases == (1,)
    waiting = choose([(3, 1), (3, 2)], [(3, 0)], count=1, at=5, staleness=2)
    assert waiting.waiting_for == "group 0, rolling out since version 3, must be trained by version 5"


def test_step_waits_as_soon_as_the_steps_left_cannot_hold_all_that_are_due():
    # at versions 1 and 2 four groups can be trained; five are due by then, so none of them can wait
    due = [(0, 0), (0, 1), (0, 2)]
    assert choose([(1, 5), (1, 6)], due, count=2, at=0, staleness=2).leases == (5, 6)
    assert choose([(1, 5), (1, 6)], [*due, (0, 3)], count=2, at=0, staleness=2).leases == (5, 6)
    assert choose(
        [(1, 5), (1, 6)], [*due, (0, 3), (0, 4)], count=2, at=0, staleness=2
    ).waiting_for.startswith("group 4,")


def test_younger_stored_groups_left_behind_do_not_count_against_a_straggler():
    stored = [(1, n) for n in range(1, 9)]
    assert choose(stored, [(0, 0)], count=2, at=0, staleness=1).leases == (1, 2)


def test_on_policy_step_waits_for_every_group_of_its_version():
    assert not choose([(4, 0)], [(4, 1)], count=2, at=4, staleness=0).leases
    assert choose([(4, 0), (4, 1)], [], count=2, at=4, staleness=0).leases == (0, 1)


def test_straggler_that_waiting_cannot_save_is_not_waited_for():
    assert choose([(9, 1)], [(2, 0)], count=1, at=9, staleness=4).leases == (1,)  # it is past its deadline
    # three are due at version 4 and one step is left for them: waiting would only delay the oldest
    assert choose([(0, 0), (0, 1)], [(0, 2)], count=1, at=4, staleness=4).leases == (0,)


def test_groups_past_the_bound_are_expired():
    stored = groups((3, 9), (1, 1), (2, 4))
    assert expired(stored, train_version=5, max_staleness=2) == [1, 4]
    assert expired(stored, train_version=3, max_staleness=2) == []


@dataclass
class Simulation:
    """A run under the dispatcher's admission rule, whose versions count from 0."""

    count: int
    staleness: int
    version: int = 0
    next_id: int = 0
    rolling_out: list[Candidate] = field(default_factory=list)
    stored: list[Candidate] = field(default_factory=list)
    steps: dict[int, list[Candidate]] = field(default_factory=dict)

    def admit(self) -> None:
        later = sum(len(leased) for step, leased in self.steps.items() if step > self.version)
        ahead = len(self.rolling_out) + len(self.stored) + later
        for _ in range((self.staleness + 1) * self.count - ahead):
            self.rolling_out.append(Candidate(self.version, self.next_id))
            self.next_id += 1

    def complete(self, n: int) -> None:
        if self.rolling_out:
            self.stored.append(self.rolling_out.pop(n % len(self.rolling_out)))

    def reject(self, n: int) -> None:
        if self.rolling_out:
            self.rolling_out.pop(n % len(self.rolling_out))
        self.admit()

    def lease(self, step: int) -> bool:
        if step in self.steps:
            return True
        bound = {"train_version": step - 1, "max_staleness": self.staleness}
        assert expired(self.stored, **bound) == []
        choice = oldest_first(self.stored, self.rolling_out, StepRequest(groups=self.count, **bound))
        assert bool(choice.leases) != bool(choice.waiting_for)
        self.steps[step] = [c for c in self.stored if c.lease_id in choice.leases]
        self.stored = [c for c in self.stored if c.lease_id not in choice.leases]
        if not choice.leases:
            del self.steps[step]
        return bool(choice.leases)

    def train(self, _: int) -> None:
        step = self.version + 1
        if self.lease(step):
            assert len(self.steps[step]) == self.count
            assert max(self.version - c.policy_version for c in self.steps[step]) <= self.staleness
            self.version += 1
            self.admit()

    def prefetch(self, _: int) -> None:
        """While a step trains, the learner asks for the groups of the next."""
        if self.lease(self.version + 1):
            self.lease(self.version + 2)

    def resume(self, n: int) -> None:
        """A learner starts again from an older checkpoint."""
        self.version = max(0, self.version - n % 4)
        for step in [s for s in self.steps if s > self.version]:
            self.stored += self.steps.pop(step)
        self.admit()

    def everything_completes(self) -> None:
        self.stored += self.rolling_out
        self.rolling_out = []


ACTIONS = ("complete", "train", "complete", "prefetch", "complete", "reject", "complete", "resume")


@settings(max_examples=250)
@given(count=st.integers(1, 4), staleness=st.integers(0, 3), actions=st.binary(max_size=60))
def test_no_order_of_events_exceeds_the_bound_or_ends_in_a_deadlock(
    count: int, staleness: int, actions: bytes
):
    run = Simulation(count, staleness)
    run.admit()
    for byte in actions:
        n, action = divmod(byte, len(ACTIONS))
        getattr(run, ACTIONS[action])(n)
    for _ in range(2 * staleness + 2):
        run.everything_completes()
        assert run.lease(run.version + 1)
        run.train(0)
