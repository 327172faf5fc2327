"""How long rewards take, as an actor tells it."""

import asyncio

from actors.actor import environment_report, idle_wait
from actors.environments.choice import EnvironmentChoice
from actors.environments.single_turn import SingleTurn
from actors.rewards.scoring.call_times import CallTimes, reward_report
from actors.rewards.scoring.scorers import Scorer
from tests.actors.rewards.answers import answer


def test_calls_under_way_and_those_that_ended_are_told_with_their_times():
    now = [0.0]
    times = CallTimes(clock=lambda: now[0])
    with times.timed():
        now[0] = 4.0
    assert (times.running, times.longest_s, times.took_s) == (0, 0.0, (4.0,))
    with times.timed():
        now[0] = 6.0
        with times.timed():
            now[0] = 9.0
            assert reward_report([times, CallTimes()]) == {
                "rewards_running": 2,
                "rewards_longest_s": 5.0,
                "reward_s": 4.0,
            }
    assert reward_report([times])["reward_s"] == (4.0 + 3.0 + 5.0) / 3
    assert reward_report([CallTimes()])["reward_s"] is None


async def test_an_actor_tells_of_a_reward_that_is_under_way_and_waits_for_it():
    began, go_on = asyncio.Event(), asyncio.Event()

    async def slow(answer) -> float:
        began.set()
        await go_on.wait()
        return 1.0

    scorer = Scorer("slow", timeout_s=20, reward=slow)
    environment = EnvironmentChoice({"": SingleTurn(scorer)})
    assert idle_wait(environment, 0) == "leases"
    assert idle_wait(environment, 1) == "environments"
    scoring = asyncio.create_task(scorer.score(answer("x")))
    await began.wait()
    assert environment_report(environment)["rewards_running"] == 1
    assert idle_wait(environment, 1) == "rewards"
    go_on.set()
    assert await scoring == 1.0
    assert environment_report(environment)["rewards_running"] == 0
    assert idle_wait(environment, 0) == "leases"
