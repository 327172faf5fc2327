"""Single-turn rollouts, end to end on a scripted engine and on a real one."""

import asyncio
import sys

import numpy as np
import pytest
import structlog

from actors.engines.base import Engine, Sampling
from actors.environments import plugin
from actors.environments.base import Environment
from actors.environments.build import build_environment, built_environment
from actors.environments.failures import end_after
from actors.environments.single_turn import SingleTurn
from actors.episodes.episode import Episode
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.rewards.base import LATER, RewardError
from actors.rewards.scoring.scorers import Scorer
from actors.settings.actors import ActorsConfig, PluginEnvironmentConfig, SingleTurnConfig
from benchmarks.scripted_engine import ScriptedEngine, policy_saying
from bus.errors import ConfigError, EngineError, EngineLostError, HandBackError, SchemaError
from bus.messages import Prompt


async def test_an_episode_holds_the_answer_and_its_reward(tokenizer):
    environment: Environment = SingleTurn.from_config(SingleTurnConfig())
    policy = policy_saying(tokenizer, "42<|end|>")
    episodes = [
        await environment.run(Task(task_id="t", prompt="40+2=", label=label), policy)
        for label in ("42", "43")
    ]
    assert [episode.trajectories[0].reward for episode in episodes] == [1.0, 0.0]
    assert [len(episode.trajectories) for episode in episodes] == [1, 1]
    assert episodes[0].metrics == {
        "rollout/reward": 1.0,
        "rollout/completion_tokens": 3.0,
        "rollout/truncated": 0.0,
        "rollout/reward_fault_fraction": 0.0,
    }


async def test_an_answer_that_is_scored_later_has_no_reward_yet(tokenizer):
    environment = SingleTurn(Scorer("later", timeout_s=60, reward=lambda answer: LATER))
    policy = policy_saying(tokenizer, "42<|end|>")
    episode = await environment.run(Task(task_id="t", prompt="40+2="), policy)
    assert [(t.reward, t.reward_due) for t in episode.trajectories] == [(0.0, True)]
    assert "rollout/reward" not in episode.metrics


async def test_a_cut_answer_counts_as_truncated(tokenizer):
    environment = SingleTurn.from_config(SingleTurnConfig())
    policy = policy_saying(tokenizer, "42<|end|>", max_new_tokens=2)
    episode = await environment.run(Task(task_id="t", prompt="40+2=", label="42"), policy)
    assert (episode.metrics["rollout/truncated"], episode.trajectories[0].reward) == (1.0, 0.0)


async def test_chat_prompts_are_taken_as_they_are(tokenizer):
    environment = SingleTurn.from_config(SingleTurnConfig())
    prompt = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    policy = policy_saying(tokenizer, "d<|end|>")
    episode = await environment.run(Task(task_id="t", prompt=prompt, label="d"), policy)
    text = tokenizer.decode(episode.trajectories[0].token_ids)
    assert text == "<|user|>a<|assistant|>b<|end|><|user|>c<|assistant|>d<|end|>"


@pytest.mark.parametrize("prompt", [[], ["text"], [{"content": "no role"}]])
async def test_a_prompt_that_is_no_chat_is_refused(tokenizer, prompt):
    environment = SingleTurn.from_config(SingleTurnConfig())
    with pytest.raises(SchemaError, match="task t: a prompt is text or messages with a role"):
        await environment.run(Task(task_id="t", prompt=prompt), policy_saying(tokenizer, "a"))


async def test_failures_are_raised_for_the_rollout_alone(tokenizer):
    environment = SingleTurn.from_config(SingleTurnConfig())
    policy = policy_saying(tokenizer, "42<|end|>")
    with pytest.raises(RewardError, match="task unlabelled has no label"):
        await environment.run(Task(task_id="unlabelled", prompt="a"), policy)
    engine = ScriptedEngine(lambda _: [1])
    engine.fail("gone")
    with pytest.raises(EngineError, match="gone"):
        await environment.run(Task(task_id="t", prompt="a"), Policy(engine, tokenizer, Sampling()))


def test_an_unknown_reward_is_a_config_error():
    with pytest.raises(ConfigError, match="did you mean 'exact'"):
        SingleTurn.from_config(SingleTurnConfig(reward="exakt"))


class Troubled:
    """An environment of the user's that does what it is told."""

    trajectories_per_episode = 1
    trouble = None

    async def run(self, task, policy):
        if isinstance(self.trouble, Exception):
            raise self.trouble
        return self.trouble


class Unbuildable(Troubled):
    def __init__(self):
        raise RuntimeError("no GPU")


TROUBLE = [
    (ValueError("mine"), EpisodeError, "raised ValueError"),
    (ExceptionGroup("agents", [KeyError("x")]), EpisodeError, "raised ExceptionGroup"),
    (EngineError("its own"), EngineError, "its own"),
    (ExceptionGroup("agents", [KeyError("x"), EngineLostError("none left")]), EngineLostError, "none left"),
    (None, EpisodeError, "return an Episode"),
    (Episode(()), EpisodeError, "return an Episode"),
]


@pytest.mark.parametrize(("trouble", "error", "said"), TROUBLE)
async def test_whatever_the_users_environment_does_fails_the_rollout_alone(trouble, error, said, monkeypatch):
    monkeypatch.setattr(Troubled, "trouble", trouble)
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    environment = build_environment(PluginEnvironmentConfig(type="plugin", environment="users_own:Troubled"))
    with pytest.raises(error, match=said):
        await environment.run(Task(task_id="t", prompt="a"), policy=None)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("Troubled", {"tries": 1}, "takes no settings"),
        ("Unbuildable", {}, "cannot be built: RuntimeError"),
        ("policy_saying", {}, "cannot be built: TypeError"),
        ("Trouble", {}, "did you mean 'Troubled'"),
        ("asyncio", {}, "is not callable"),
        ("dict_of_nothing", {}, "has no run and no trajectories_per_episode"),
    ],
)
def test_an_unusable_environment_is_a_config_error(name, settings, said, monkeypatch):
    monkeypatch.setitem(globals(), "dict_of_nothing", dict)
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    config = PluginEnvironmentConfig(type="plugin", environment=f"users_own:{name}", settings=settings)
    with pytest.raises(ConfigError, match=said):
        build_environment(config)


class ScoringGroups(Troubled):
    trajectories_per_episode = None

    async def score_group(self, episodes):
        return dict.fromkeys(episodes, self.trouble)


class ChangingTasks(Troubled):
    async def run(self, task, policy):
        task.messages[0]["content"] += " Think."
        task.metadata["seen"] = task.metadata.get("seen", 0) + 1
        return await super().run(task, policy)


async def test_a_task_that_an_environment_changes_is_the_same_for_other_rollouts(monkeypatch):
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    config = PluginEnvironmentConfig(type="plugin", environment="users_own:ChangingTasks")
    prompt = Prompt(content=[{"role": "user", "content": "hi"}], metadata={"a": 1})
    with pytest.raises(EpisodeError, match="returned None"):
        await build_environment(config).run(Task.of(prompt, "g.0"), None)
    assert (prompt.content, prompt.metadata) == ([{"role": "user", "content": "hi"}], {"a": 1})


class ExitingAtGroups(ScoringGroups):
    async def score_group(self, episodes):
        sys.exit(2)


async def test_a_users_score_group_that_exits_fails_its_group_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    config = PluginEnvironmentConfig(type="plugin", environment="users_own:ExitingAtGroups")
    with pytest.raises(EpisodeError, match=r"raised SystemExit\(2\) on a group's rewards"):
        await build_environment(config).score_group({0: Episode(())})


@pytest.mark.parametrize("scored", [None, Episode(())])
async def test_what_a_users_score_group_returns_is_checked(scored, monkeypatch):
    monkeypatch.setattr(Troubled, "trouble", scored)
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    config = PluginEnvironmentConfig(type="plugin", environment="users_own:ScoringGroups")
    environment = build_environment(config)
    with pytest.raises(EpisodeError, match="for sample 0: return an Episode with trajectories"):
        await environment.score_group({0: Episode(())})
    monkeypatch.setattr(ScoringGroups, "trajectories_per_episode", 1)
    with pytest.raises(ConfigError, match="set trajectories_per_episode = None"):
        build_environment(config)


class Long(Troubled):
    stop = None

    def stop_with(self, stop):
        if self.trouble is not None:
            raise self.trouble
        self.stop = stop

    async def run(self, task, policy):
        await self.stop.wait()
        raise HandBackError("not done")


class Endless(Long):
    trajectories_per_episode = None

    async def run(self, task, policy):
        await asyncio.Event().wait()

    async def score_group(self, episodes):
        await asyncio.Event().wait()

    close = None


async def test_a_users_environment_that_never_returns_ends_its_rollout_as_timeout(monkeypatch):
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    monkeypatch.setattr(Endless, "close", lambda self: asyncio.Event().wait())
    monkeypatch.setattr(plugin, "CLOSE_S", 0.01)
    config = PluginEnvironmentConfig(type="plugin", environment="users_own:Endless", rollout_timeout_s=0.01)
    environment = build_environment(config)
    async with asyncio.timeout(30):
        for working, what in (
            (environment.run(Task(task_id="t", prompt="a"), policy=None), "a rollout of t"),
            (environment.score_group({}), "a group's rewards"),
        ):
            with pytest.raises(
                EpisodeError, match=f"{what} took longer than rollout_timeout_s=0.01"
            ) as raised:
                await working
            assert end_after(raised.value) == "timeout"
        with structlog.testing.capture_logs() as logs:
            await environment.close()
    assert [entry["event"] for entry in logs] == ["environment_not_closed"]


async def test_a_users_environment_hears_of_the_stop_and_hands_its_rollouts_back(monkeypatch):
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    config = PluginEnvironmentConfig(type="plugin", environment="users_own:Long")
    async with built_environment(
        ActorsConfig(environment=config), stop := asyncio.Event(), ()
    ) as environment:
        rollout = asyncio.create_task(environment.run(Task(task_id="t", prompt="a"), policy=None))
        stop.set()
        with pytest.raises(HandBackError, match="not done"):
            async with asyncio.timeout(30):
                await rollout
    monkeypatch.setattr(Troubled, "trouble", KeyError("mine"))
    with pytest.raises(ConfigError, match="users_own:Long: stop_with raised KeyError"):
        async with built_environment(ActorsConfig(environment=config), stop, ()):
            pass


async def test_a_group_on_the_embedded_engine(serve, tokenizer):
    environment = SingleTurn.from_config(SingleTurnConfig(reward="contains"))
    async with serve(policy_version=6) as served:
        engine: Engine = served
        policy = Policy(engine, tokenizer, Sampling(max_new_tokens=8, stop_token_ids=(1,)))
        # the tiny model's vocabulary is smaller than the tokenizer's
        tasks = [Task(task_id=f"g.{n}", prompt="123", label="7") for n in range(6)]
        episodes = await asyncio.gather(*(environment.run(task, policy) for task in tasks))
    assert len({tuple(episode.trajectories[0].token_ids) for episode in episodes}) > 1
    for episode in episodes:
        [trajectory] = episode.trajectories
        assert trajectory.loss_mask.tolist()[:5] == [False] * 5
        assert set(trajectory.policy_versions[trajectory.loss_mask].tolist()) == {6}
        assert np.isfinite(trajectory.behaviour_logprobs).all()
