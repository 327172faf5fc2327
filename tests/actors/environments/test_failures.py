"""When an environment or a reward that fails too often ends the run: each counts for itself."""

import time

import pytest

from actors.environments import failures as environment_failures
from actors.environments.choice import EnvironmentChoice
from actors.environments.failures import EnvironmentFailures
from actors.environments.single_turn import SingleTurn
from actors.episodes.episode import FailedEpisode
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.rewards.base import BudgetSpentError, InvalidRewardError, RewardError
from actors.rewards.scoring.scorers import Scorer
from actors.settings.groups import FailureLimitsConfig
from bus.errors import ConfigError

ONE = SingleTurn(Scorer("exact", timeout_s=60))
WORKED = {0: FailedEpisode("completed", "")}
FAILED = {0: FailedEpisode("environment_error", "")}
AT_ONCE = FailureLimitsConfig(rollouts=6, at_least=3, after_s=0)


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(environment_failures, "MOST_INVALID_REWARDS", 3)


def several(serves=True, **limits):
    """Failures of a run with three environments."""
    return EnvironmentFailures(
        EnvironmentChoice({"": ONE, "calc": ONE, "game": ONE}), AT_ONCE.model_copy(update=limits),
        serves=lambda: serves,
    )  # fmt: skip


@pytest.fixture
def failures():
    return several()


def task(name=None):
    return Task(task_id="t", prompt="p", metadata={} if name is None else {"environment": name})


INVALID = InvalidRewardError("returned None")
BROKEN = EpisodeError("my_pkg:Game raised KeyError('board')")
UNSCORED = RewardError("reward mine on task t raised KeyError('label')")


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
            "environment 'calc': of the latest 3 rollouts, 3 failed by their environment: cor.* The last: E",
        ),
        (
            UNSCORED,
            "reward_error",
            "environment 'calc': of the latest 3 rollouts, 3 failed by their reward: .* The last: RewardEr",
        ),
        (
            EpisodeError("slow"),
            "timeout",
            "environment 'calc': of the latest 3 rollouts, 3 failed by their envi",
        ),
        (
            EpisodeError("mcp"),
            "tool_error",
            "environment 'calc': of the latest 3 rollouts, 3 failed by their env",
        ),
    ],
)
def test_one_environment_that_never_works_ends_the_run_while_others_do(failures, error, end, told):
    for _ in range(2):
        failures.failed(task("calc"), error, end)
        failures.count(task("calc").metadata, {0: FailedEpisode(end, "")})
        failures.worked(task("game"))
        failures.count(task("game").metadata, WORKED)
        failures.count(task().metadata, WORKED)
    with pytest.raises(ConfigError, match=told):
        failures.failed(task("calc"), error, end)
    kind = {"reward_error": "reward", "timeout": "infra"}.get(end, "environment")
    counted = {
        f"environment/{name}/{one}_failed_episodes": 2 * (name == "calc" and one == kind)
        for name in ("calc", "game", "default")
        for one in ("reward", "environment", "infra")
    }
    episodes = {f"environment/{name}/episodes": 2 for name in ("calc", "game", "default")}
    assert failures.metrics == {**episodes, **counted}


def test_prompts_that_name_no_environment_and_unknown_ones_are_told_apart(failures):
    for name, told in (
        (None, "the environment of prompts that choose none: of the"),
        ("gone", "'unknown': "),
    ):
        for _ in range(2):
            failures.failed(task(name), BROKEN, "environment_error")
        with pytest.raises(ConfigError, match=told):
            failures.failed(task(name), BROKEN, "environment_error")


def test_the_only_environment_of_a_run_has_no_name_and_no_numbers_of_its_own():
    failures = EnvironmentFailures(ONE, AT_ONCE)
    for _ in range(2):
        failures.failed(task("a field of the user's"), BROKEN, "environment_error")
    with pytest.raises(ConfigError, match=r"^of the latest 3 rollouts, 3 failed"):
        failures.failed(task(), BROKEN, "environment_error")
    assert failures.metrics == {}


def test_failures_below_the_fraction_and_those_of_engines_end_nothing():
    failures = several(serves=False)
    for _ in range(9):
        failures.worked(task("calc"))
        failures.failed(task("calc"), EpisodeError("the engine fell"), "engine_error")
        failures.failed(task("calc"), EpisodeError("slow"), "timeout")  # no engine serves
        failures.worked(task("calc"))
        failures.failed(task("calc"), UNSCORED, "reward_error")
    assert failures.alarm == ""


def test_a_share_of_failures_ends_the_run_also_after_it_worked(failures):
    for _ in range(6):
        failures.worked(task("calc"))
    failures.failed(task("calc"), UNSCORED, "reward_error")
    failures.failed(task("calc"), BROKEN, "environment_error")
    with pytest.raises(
        ConfigError, match="of the latest 6 rollouts, 2 failed by their reward and 1 failed by"
    ):
        failures.failed(task("calc"), UNSCORED, "reward_error")


def test_an_environment_that_hangs_after_it_worked_ends_the_run(failures):
    failures.worked(task("calc"))
    failures.failed(task("calc"), EpisodeError("hangs"), "timeout")
    with pytest.raises(ConfigError, match="of the latest 3 rollouts, 2 failed by their environment"):
        failures.failed(task("calc"), EpisodeError("hangs"), "timeout")


def test_a_group_whose_reward_fails_counts_as_its_rollouts_do():
    failures = several(fraction=1.0)
    for _ in range(4):
        failures.worked(task("calc"))
    with pytest.raises(ConfigError, match="of the latest 4 rollouts, 4 failed by their reward"):
        failures.failed(task("calc"), RewardError("group reward"), "reward_error", worked_before=4)


def test_no_bound_ends_no_run():
    failures = several(fraction=None)
    for _ in range(99):
        failures.failed(task("calc"), UNSCORED, "reward_error")
    assert failures.alarm == ""


def test_many_episodes_that_could_not_be_scored_are_an_alarm_and_end_no_run():
    failures = several(fraction=0.5, after_s=0.0)
    for _ in range(9):
        failures.worked(task("calc"), "status -9")
    assert failures.alarm.startswith("environment 'calc': of the latest 6 episodes, 6 have the lowest reward")
    assert failures.alarm.endswith("the last: status -9")
    for _ in range(4):
        failures.worked(task("calc"))
    assert failures.alarm == ""


def test_a_service_that_is_away_for_a_while_ends_nothing():
    failures = several(after_s=3600.0)
    for _ in range(9):
        failures.failed(task("calc"), UNSCORED, "reward_error")
    assert failures.alarm.startswith(
        "environment 'calc': of the latest 6 rollouts, 6 failed by their reward, the"
    )
    for _ in range(4):
        failures.worked(task("calc"))
    assert failures.alarm == ""


def test_each_evaluation_is_judged_by_its_own_rollouts_and_two_in_a_row_end_the_run():
    failures = EnvironmentFailures(
        ONE, FailureLimitsConfig(rollouts=6, at_least=3, after_s=0.02), of="held-out prompts"
    )
    for _ in range(3):
        failures.failed(task(), UNSCORED, "reward_error")
    assert failures.alarm.startswith("held-out prompts: of the latest 3 rollouts, 3 failed by their reward")
    time.sleep(0.03)
    failures.forget_judged()
    failures.failed(task(), UNSCORED, "reward_error")  # chance may fail one of a reward that works again
    failures.failed(task(), UNSCORED, "reward_error")
    with pytest.raises(ConfigError, match="held-out prompts: of the latest 3 rollouts, 3 failed"):
        failures.failed(task(), UNSCORED, "reward_error")
    failures.forget_judged()
    for _ in range(3):
        failures.worked(task())
    failures.failed(task(), UNSCORED, "reward_error")
    assert failures.alarm == ""


def test_evaluations_of_few_prompts_are_judged_together():
    failures = EnvironmentFailures(ONE, AT_ONCE)
    for _ in range(2):
        failures.failed(task(), UNSCORED, "reward_error")
    failures.forget_judged()
    with pytest.raises(ConfigError, match="of the latest 3 rollouts, 3 failed"):
        failures.failed(task(), UNSCORED, "reward_error")


def test_the_traceback_of_the_users_own_code_is_told(failures):
    def score(answer):
        return answer["no such key"]

    try:
        try:
            score({})
        except KeyError as cause:
            raise RewardError("reward mine on task t raised KeyError") from cause
    except RewardError as error:
        found = error
    for _ in range(2):
        failures.failed(task("calc"), found, "reward_error")
    with pytest.raises(
        ConfigError, match=r"(?s)Traceback .*in score\n.*answer\[\"no such key\"\].*KeyError: 'no su"
    ):
        failures.failed(task("calc"), found, "reward_error")


def test_a_budget_that_is_spent_ends_the_run_at_once(failures):
    with pytest.raises(ConfigError, match="spent"):
        failures.failed(task("calc"), BudgetSpentError("spent"), "reward_error")


def test_screens_show_a_long_failure_in_short():
    failures = several(after_s=60.0)
    long = EpisodeError(
        "the program 'my_agent': status 1: Traceback\n" + "  line\n" * 99 + "KeyError: 'board'"
    )
    for _ in range(3):
        failures.failed(task("calc"), long, "environment_error")
    told = "environment 'calc': of the latest 3 rollouts, 3 failed by their environment, the last: Epi"
    assert failures.alarm.startswith(told)
    assert failures.alarm.endswith("line line KeyError: 'board'")
    assert len(failures.alarm) < 450
    assert "\n" not in failures.alarm
