"""When an environment that never works, or rewards that never are, end the run: each counts for itself."""

import pytest

from actors import environment_failures as limits
from actors.environment_failures import EnvironmentFailures
from actors.environments.base import EpisodeError, FailedEpisode, Task
from actors.environments.choice import EnvironmentChoice
from actors.environments.single_turn import SingleTurn
from actors.rewards.base import BudgetSpentError, InvalidRewardError, RewardError
from actors.rewards.scoring import Scorer
from bus.errors import ConfigError

ONE = SingleTurn(Scorer("exact", timeout_s=1))
WORKED = {0: FailedEpisode("completed", "")}
FAILED = {0: FailedEpisode("environment_error", "")}


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(limits, "MOST_INVALID_REWARDS", 3)
    monkeypatch.setattr(limits, "MOST_FAILURES_AT_FIRST", 3)
    monkeypatch.setattr(limits, "AT_FIRST_S", 0.0)


@pytest.fixture
def failures():
    return EnvironmentFailures(EnvironmentChoice({"": ONE, "calc": ONE, "game": ONE}))


def task(name=None):
    return Task(task_id="t", prompt="p", metadata={} if name is None else {"environment": name})


INVALID = InvalidRewardError("returned None")
BROKEN = EpisodeError("my_pkg:Game raised KeyError('board')")


@pytest.mark.parametrize(
    ("error", "end", "told"),
    [
        (
            INVALID,
            "reward_error",
            "environment 'calc': 3 rewards in a row were none, the last: returned None",
        ),
        (
            BROKEN,
            "environment_error",
            "environment 'calc': each of the first 3 rollouts failed, the last: Epi",
        ),
    ],
)
def test_one_environment_that_never_works_ends_the_run_while_others_do(failures, error, end, told):
    for _ in range(2):
        failures.failed(task("calc"), error, end)
        failures.count(task("calc").metadata, FAILED)
        failures.count(task("game").metadata, WORKED)
        failures.count(task().metadata, WORKED)
    with pytest.raises(ConfigError, match=told):
        failures.failed(task("calc"), error, end)
    assert failures.metrics == {
        "environment/calc/episodes": 2, "environment/calc/infra_failed_episodes": 2,
        "environment/game/episodes": 2, "environment/game/infra_failed_episodes": 0,
        "environment/default/episodes": 2, "environment/default/infra_failed_episodes": 0,
    }  # fmt: skip


def test_prompts_that_name_no_environment_and_unknown_ones_are_told_apart(failures):
    for name, told in (
        (None, "the environment of prompts that choose none: each of"),
        ("gone", "'unknown': "),
    ):
        for _ in range(2):
            failures.failed(task(name), BROKEN, "environment_error")
        with pytest.raises(ConfigError, match=told):
            failures.failed(task(name), BROKEN, "environment_error")


def test_the_only_environment_of_a_run_has_no_name_and_no_numbers_of_its_own():
    failures = EnvironmentFailures(ONE)
    for _ in range(2):
        failures.failed(task("a field of the user's"), BROKEN, "environment_error")
    with pytest.raises(ConfigError, match=r"^each of the first 3 rollouts failed"):
        failures.failed(task(), BROKEN, "environment_error")
    assert failures.metrics == {}


def test_what_fails_after_it_worked_or_for_other_reasons_ends_nothing(failures):
    for _ in range(9):  # a server that is away, an engine, a slow tool
        failures.failed(task("calc"), RewardError("the judge is away"), "reward_error")
        failures.failed(task("calc"), EpisodeError("slow"), "timeout")
    failures.failed(task("calc"), BROKEN, "environment_error")
    failures.count(task("calc").metadata, WORKED)
    for _ in range(9):
        failures.failed(task("calc"), BROKEN, "environment_error")
    for _ in range(2):
        failures.failed(task("calc"), INVALID, "reward_error")
    failures.count(task("calc").metadata, WORKED)
    failures.failed(task("calc"), INVALID, "reward_error")  # the first in a row


def test_an_episode_that_ends_well_counts_before_its_siblings_have_ended(failures):
    failures.failed(task("calc"), BROKEN, "environment_error")
    failures.worked(task("calc"))
    for _ in range(9):
        failures.failed(task("calc"), BROKEN, "environment_error")


def test_a_service_that_is_started_late_ends_nothing(failures, monkeypatch):
    monkeypatch.setattr(limits, "AT_FIRST_S", 3600.0)
    for _ in range(9):
        failures.failed(task("calc"), BROKEN, "environment_error")


def test_a_budget_that_is_spent_ends_the_run_at_once(failures):
    with pytest.raises(ConfigError, match="spent"):
        failures.failed(task("calc"), BudgetSpentError("spent"), "reward_error")


def test_screens_say_why_each_rollout_fails_until_one_does_not(failures, monkeypatch):
    monkeypatch.setattr(limits, "ALARM_AT_FIRST", 2)
    monkeypatch.setattr(limits, "AT_FIRST_S", 60.0)
    long = EpisodeError(
        "the program 'my_agent': status 1: Traceback\n" + "  line\n" * 99 + "KeyError: 'board'"
    )
    failures.failed(task("calc"), BROKEN, "environment_error")
    assert failures.alarm == ""
    failures.failed(task("calc"), long, "environment_error")
    told = "environment 'calc': each of the first 2 rollouts failed, the last: EpisodeError: the program "
    assert failures.alarm.startswith(told)
    assert failures.alarm.endswith("line line KeyError: 'board'")
    assert len(failures.alarm) < 400
    assert "\n" not in failures.alarm
    failures.worked(task("calc"))
    assert failures.alarm == ""
