"""An environment that fails a fraction of its rollouts leaves the others as they are."""

from collections import Counter

from actors.engines.base import Sampling
from actors.environments.plugin import plugin_environment
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.settings.actors import PluginEnvironmentConfig
from benchmarks.scripted_engine import ScriptedEngine
from soak.failing_environment import FAILURES
from tests.actors.rollouts.whole_actor import TOKENIZER, answer_with

ROLLOUTS = 200


def failing(fraction, environment=None):
    settings = {
        "fraction": fraction,
        "environment": environment or {"type": "single_turn", "reward": "exact"},
    }
    name = "soak.failing_environment:FailingEnvironment"
    return plugin_environment(PluginEnvironmentConfig(type="plugin", environment=name, settings=settings))


async def outcomes(environment):
    policy = Policy(ScriptedEngine(answer_with("4")), TOKENIZER, Sampling(max_new_tokens=8))
    task = Task(task_id="t", prompt="2+2=", label="4")
    found = Counter()
    for _ in range(ROLLOUTS):
        try:
            episode = await environment.run(task, policy)
        except FAILURES as error:
            found[type(error)] += 1
        else:
            found[episode.trajectories[0].reward] += 1
    return found


async def test_a_fraction_fails_in_every_way_and_the_others_keep_their_rewards():
    found = await outcomes(failing(0.5))
    assert found.keys() == {1.0, *FAILURES}
    assert 60 < found[1.0] < 140  # 5.6 standard deviations
    assert await outcomes(failing(0.0)) == {1.0: ROLLOUTS}
