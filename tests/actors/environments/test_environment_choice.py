"""Tools, games and single turns in one run: each source of prompts has its environment and its reward."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from actors.engines.base import Sampling
from actors.environments.build import built_environment
from actors.environments.choice import EnvironmentChoice
from actors.environments.prompt_choices import refuse_unknown_choices
from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.rewards.group_filters import load_filter
from actors.rollouts.worker import Worker
from actors.settings.actors import ActorsConfig
from actors.settings.agents import AgentConfig
from actors.weights.follow import PolicyFollower
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError
from bus.messages import Prompt
from learner.initial.scratch_model import character_tokenizer
from storage.client.reader import ReplayReader
from storage.prompts.sources import load_sources
from storage.settings.admission import AdmissionConfig
from storage.settings.data import DataConfig
from tests.storage.serving import LearnerStandIn, read_batch, running, serving

TOKENIZER = character_tokenizer()
CALC = {"type": "tools", "calls": "tags", "tools": [{"type": "calculator", "name": "calc"}]}
ACTORS = ActorsConfig.model_validate({
    "environment": {"type": "single_turn", "reward": "exact", "rewards": ["contains"]},
    "environments": [
        {"name": "calc", "environment": CALC},
        {"name": "nim", "environment": {"type": "game", "game": {"type": "nim"}}},
    ],
})  # fmt: skip
SOURCES = {
    "sums": ("2*3", "6", {"environment": "calc"}),
    "games": ("nim 6 3", None, {"environment": "nim"}),
    "sorts": ("sort 31", "13", {"reward": "contains"}),
}


def answering(tokens):
    """Call the calculator, play Nim by taking two, and sort with a word too many."""
    asked = TOKENIZER.decode(tokens)
    if "2*3" in asked:
        said = "6" if "<result>6</result>" in asked else "<calc>2*3</calc>"
    else:
        said = "2" if "nim" in asked or "3" in asked.rpartition("<|user|>")[2][:3] else "is 13"
    return TOKENIZER.encode(f"{said}<|end|>")


def policy():
    return Policy(ScriptedEngine(answering), TOKENIZER, Sampling(max_new_tokens=24))


def written(directory):
    """The sources of the test as files and settings."""
    for name, (prompt, label, _) in SOURCES.items():
        (directory / f"{name}.jsonl").write_text(json.dumps({"prompt": prompt, "label": label}))
    return DataConfig.model_validate({
        "sources": [
            {"name": name, "prompts": directory / f"{name}.jsonl", **choices}
            for name, (_, _, choices) in SOURCES.items()
        ]
    }).sources  # fmt: skip


@pytest.mark.nats
@pytest.mark.usefixtures("quick")
async def test_one_run_mixes_tools_games_and_single_turns_by_the_source_of_a_prompt(bus, tmp_path):
    sources = written(tmp_path)
    prompts, mixed = load_sources(sources, DataConfig().keys, tmp_path)
    refuse_unknown_choices(prompts, ACTORS, where="the sources")
    six = AdmissionConfig(groups_per_step=6, samples_per_prompt=2, max_staleness=0)
    asked = policy()
    await asked._engine.start()
    async with built_environment(ACTORS, asyncio.Event(), ()) as environment:
        worker = Worker(
            bus, asked, environment,
            follower=PolicyFollower(bus, asked._engine), keep=load_filter("none"), shards=2, name="tester",
        )  # fmt: skip
        reader = ReplayReader(bus, "a")
        async with serving(bus, tmp_path, six, prompts=prompts, sources=mixed) as storage:
            await LearnerStandIn(bus).publish(0)
            async with running(lambda stop: worker.run(stop, groups_at_once=6)):
                async with asyncio.timeout(30):
                    groups = await read_batch(reader, 1)
        reader.close()
    found = {}
    for group in groups:
        said = {(t.agent, len(t.turns), t.reward) for t in group}
        found.setdefault(storage.data.source(group[0].lease_id), []).append(said)
    assert found == {
        "sums": [{("solver", 2, 1.0)}] * 2,
        "games": [{("player-1", 2, 1.0), ("player-2", 1, 0.0)}] * 2,
        "sorts": [{("solver", 1, 1.0)}] * 2,
    }


async def test_a_prompt_that_names_an_environment_which_is_not_there_fails_and_is_refused_before():
    task = Task(task_id="t", prompt="x", metadata={"environment": "calk"})
    async with built_environment(ACTORS, asyncio.Event(), ()) as environment:
        with pytest.raises(EpisodeError, match="its environment is 'calk': did you mean 'calc'"):
            await environment.run(task, policy())
    good = [Prompt(content="a", label="1", metadata={"environment": n}) for n in ("nim", None)]
    good += [Prompt(content="b", label="1")]
    refuse_unknown_choices(good, ACTORS, where="mine.jsonl")
    for wrong in ("calk", ["calc"]):
        bad = [*good, Prompt(content="c", label="1", metadata={"environment": wrong})]
        with pytest.raises(ConfigError, match=r"mine.jsonl, prompt 4: its environment is .* has calc, nim"):
            refuse_unknown_choices(bad, ACTORS, where="mine.jsonl")
    refuse_unknown_choices(bad, ActorsConfig(), where="mine.jsonl")  # of one environment nobody chooses


def test_a_prompt_may_choose_only_among_the_rewards_of_its_environment():
    contains = Prompt(content="a", label="1", metadata={"reward": "contains"})
    refuse_unknown_choices([contains], ACTORS, where="mine.jsonl")
    there = Prompt(content="a", metadata={"reward": "contains", "environment": "calc"})
    with pytest.raises(ConfigError, match=r"prompt 1: its metadata choose the reward 'contains'"):
        refuse_unknown_choices([there], ACTORS, where="mine.jsonl")


class Scoring:
    """Gives every episode of a group to a list of its own."""

    def __init__(self, each):
        self.trajectories_per_episode = each
        self.scored = []

    async def run(self, task, policy):
        return Episode((SimpleNamespace(),))

    async def score_group(self, episodes):
        self.scored.append(dict(episodes))
        return {sample: FailedEpisode("reward_error", "x") for sample in episodes}


async def test_a_group_is_scored_by_the_environment_of_its_prompt():
    first, second = Scoring(1), Scoring(1)
    choice = EnvironmentChoice({"": first, "other": second})
    task = Task(task_id="t", prompt="x", metadata={"environment": "other"})
    episodes = {n: await choice.run(task, policy()) for n in (0, 2)}
    assert {n: outcome.end for n, outcome in (await choice.score_group(episodes)).items()} == {
        0: "reward_error", 2: "reward_error",
    }  # fmt: skip
    assert (first.scored, second.scored) == ([], [episodes])


async def test_every_environment_that_hands_back_is_told_of_the_stop():
    agent = AgentConfig(command="{python} -c pass")
    actors = ActorsConfig(environments=({"name": "agent", "environment": agent},))
    stop = asyncio.Event()
    async with built_environment(actors, stop, ()) as environment:
        assert environment._environments["agent"]._stop is stop


@pytest.mark.parametrize(("each", "of_all"), [((1, 1), 1), ((1, 5), None), ((None, None), None)])
def test_episodes_have_equally_many_trajectories_only_where_all_environments_say_so(each, of_all):
    named = {str(n): Scoring(count) for n, count in enumerate(each)}
    assert EnvironmentChoice(named).trajectories_per_episode == of_all
