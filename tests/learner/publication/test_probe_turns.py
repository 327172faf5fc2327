"""The probe is scored at each version, or at so many that training loses little time to it."""

import pytest

from bus.messages import Probe
from learner.publication.probe import LARGEST_PART, LONGEST_GAP_S, ProbeTurns

PROBE = Probe(token_ids=((1, 2),), logprobs=((-1.0,),))


class Training:
    """Steps of a given length behind each other, each of which publishes a version, on a clock of its own."""

    def __init__(self, *, at_each: bool = False) -> None:
        self.now = 0.0
        self.scored_at: list[float] = []
        self._turns = ProbeTurns(at_each=at_each, now=lambda: self.now)

    async def steps(self, count: int, step_s: float, *, scoring_s: float = 0.1, needed: bool = False) -> int:
        """Take steps; return how many versions were scored."""

        async def score() -> Probe:
            self.scored_at.append(self.now)
            self.now += scoring_s
            return PROBE

        before = len(self.scored_at)
        for _ in range(count):
            self.now += step_s
            assert await self._turns.scored(score, needed=needed) in (PROBE, None)
        return len(self.scored_at) - before


async def test_short_steps_lose_a_fiftieth_of_their_time_and_the_first_version_is_scored():
    training = Training()
    scored = await training.steps(1000, 0.35)
    assert training.scored_at[0] == pytest.approx(0.35)
    assert 0.9 * LARGEST_PART < 0.1 * scored / training.now < LARGEST_PART


@pytest.mark.parametrize(
    ("how", "step_s", "needed"), [({}, 5.5, False), ({}, 0.35, True), ({"at_each": True}, 0.35, False)]
)
async def test_each_version_is_scored_of_long_steps_where_it_is_needed_and_where_arithmetic_is_exact(
    how, step_s, needed
):
    assert await Training(**how).steps(50, step_s, needed=needed) == 50


async def test_a_first_scoring_that_compiles_delays_the_next_by_a_minute_at_most():
    training = Training()
    await training.steps(1, 1.0, scoring_s=90.0)
    await training.steps(100, 1.0)
    assert training.scored_at[1] - training.scored_at[0] <= 90.0 + LONGEST_GAP_S + 1.0
