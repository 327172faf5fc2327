"""The examples of docs/extending.md, and of the tutorial that it leads to, run as it says; start-up refuses
a misspelt plug-in."""

import importlib
import re
import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from tomllib import loads
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from actors.engines.base import Sampling
from actors.environments.build import build_environment
from actors.episodes.errors import ToolError
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.rewards.group_filters import load_filter
from actors.settings.actors import PluginEnvironmentConfig
from actors.tools.base import ToolResult
from actors.tools.build import build_tools
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError
from bus.messages import Prompt
from launch.settings.run_config import RunConfig, validate
from learner.algorithms.advantages.step_advantages import estimate_advantages
from learner.algorithms.aggregation import aggregation
from learner.algorithms.hooks import figures_after_step, with_processed_rewards
from learner.algorithms.losses.objective import Objective, token_losses
from learner.algorithms.plugin import refuse_bad_plugins
from learner.algorithms.tokens import LossTokens
from learner.backends.megatron.conversion.families import QWEN2, family_of
from learner.config.loss import ReinforceLoss
from learner.data.streams import STREAMS, Stream, pack_streams
from learner.distributed.exact_sums import exact_sums
from storage.model_files.families import FAMILIES, ModelFamily
from storage.prompt_files.dataset import streamed_prompts
from storage.prompts.sampler import Draw, load_sampler
from storage.prompts.stream import BLOCK_ROWS, first_block
from tests.factories import make_trajectory

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / page).read_text() for page in ("extending.md", "tutorials/own-environment.md"))
EXAMPLES = dict(re.findall(r"^```python\n# (\S+)\.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
"""Source by path, without the suffix."""
SETTINGS = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def beside_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The examples that belong to the user lie in a directory that is searched."""
    own = [name for name in EXAMPLES if "/" not in name]
    for name in own:
        (tmp_path / f"{name}.py").write_text(EXAMPLES[name])
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in own:
        sys.modules.pop(name, None)


def example(path: str) -> ModuleType:
    """An example that belongs to a package of Sluice, as a module of its own."""
    module = ModuleType(path.replace("/", "."))
    exec(compile(EXAMPLES[path], path, "exec", dont_inherit=True), module.__dict__)
    return module


def start_up(config: RunConfig) -> None:
    """Return what actors and learner check before they begin."""
    build_environment(config.actors.environment)
    load_filter(config.actors.group_filter)
    refuse_bad_plugins(config.learner)
    load_sampler(config.data.sampler)
    if config.data.is_stream:
        next(first_block(config.data.prompts, config.data.keys))


def settings_of(name: str) -> RunConfig:
    [block] = [block for block in SETTINGS if f"{name}:" in block]
    return validate(loads(block))


@pytest.mark.parametrize("block", SETTINGS, ids=lambda block: re.search(r"(\w+):", block)[1])
def test_start_up_takes_each_plugin_and_refuses_it_misspelt(block: str):
    start_up(validate(loads(block)))
    misspelt = validate(loads(re.sub(r'(\w+:\w+)"', r'\1_not"', block)))
    with pytest.raises(ConfigError, match="_not"):
        start_up(misspelt)


def test_every_plugin_of_the_page_has_settings():
    named = {module for block in SETTINGS for module in re.findall(r'"(\w+):', block)}
    assert named == {name for name in EXAMPLES if "/" not in name}


def test_the_filter_looks_at_all_rewards():
    too_easy = load_filter(settings_of("my_filter").actors.group_filter)
    group = [make_trajectory(reward=1.0), make_trajectory(sample=1, reward=1.0)]
    assert too_easy([t.reward for t in group]) == "too_easy"
    assert too_easy([1.0, 0.0]) is None


def test_the_source_yields_the_same_prompts_from_any_position():
    data = settings_of("my_prompts").data
    first = list(first_block(data.prompts, data.keys))
    assert (len(first), data.is_stream) == (BLOCK_ROWS, True)
    a, b = re.findall(r"\d+", first[7].content)
    assert first[7].label == str(int(a) + int(b))
    later = streamed_prompts(data.prompts, data.keys, 200)
    assert list(islice(later, BLOCK_ROWS - 200)) == first[200:]


def test_the_sampler_draws_what_is_solved_sometimes_more_often():
    name, sampler = load_sampler(settings_of("my_sampler").data.sampler)
    reward_mean, groups = np.array([0.0, 0.5, 1.0, 0.5]), np.array([4, 4, 4, 4])
    draw = Draw(
        count=1000, prompts=[Prompt(content=str(n)) for n in range(4)], drawn=groups, groups=groups,
        reward_mean=reward_mean, quarantined=np.array([False, False, False, True]),
        rng=np.random.default_rng(0), state={},
    )  # fmt: skip
    counts = np.bincount(sampler(draw), minlength=4)
    assert (name, draw.state) == ("my_sampler:unsure", {"draws": 1})
    assert counts[1] > 850
    assert 0 < counts[0] < 100
    assert counts[3] == 0


class Characters:
    """A tokenizer of one token per character, of which 0 ends an answer: quick to import."""

    chat_template = ""
    added_tokens_decoder: ClassVar[dict] = {}

    def apply_chat_template(
        self, conversation: list, *, tools: None, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return "".join(message["content"] for message in conversation)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token)


async def test_the_environment_asks_again():
    environment = build_environment(settings_of("my_retries").actors.environment)
    said = iter(("wrong", "12"))
    engine = ScriptedEngine(lambda prompt: [*map(ord, next(said)), 0])
    policy = Policy(engine, Characters(), Sampling(stop_token_ids=(0,)))
    episode = await environment.run(Task(task_id="t", prompt="sort 21", label="12"), policy)
    assert {trajectory.reward for trajectory in episode.trajectories} == {0.9}
    assert sum(len(trajectory.turns) for trajectory in episode.trajectories) == 2


def test_a_misspelt_setting_of_the_environment_is_refused_with_those_that_there_are():
    config = settings_of("my_retries").actors.environment.model_copy(update={"settings": {"trys": 2}})
    with pytest.raises(ConfigError, match=r"(?s)settings\.trys: .*Settings of 'my_retries:Retries' are: tri"):
        build_environment(config)


async def test_the_game_is_won_by_whoever_reaches_nothing():
    environment = build_environment(settings_of("my_game").actors.environment)
    said = iter(("1", "2", "2", "2"))
    engine = ScriptedEngine(lambda prompt: [*map(ord, next(said)), 0])
    policy = Policy(engine, Characters(), Sampling(stop_token_ids=(0,)))
    episode = await environment.run(Task(task_id="t", prompt="count down", label="7"), policy)
    assert {(t.agent, t.reward) for t in episode.trajectories} == {("player-1", 0.0), ("player-2", 1.0)}


async def test_the_tool_answers_and_says_what_the_model_did_wrong():
    [tool] = build_tools(settings_of("my_tool").actors.environment.tools).values()
    assert await tool.call({"article": "bolts"}) == ToolResult("7")
    assert (await tool.call({"article": "nuts"})).failed
    await tool.close()
    with pytest.raises(ToolError, match="counted"):
        await tool.call({"article": "bolts"})


@pytest.mark.parametrize("settings", [{"tries": 0}, {"tryes": 3}])
def test_the_environment_refuses_wrong_settings(settings: dict[str, int]):
    config = PluginEnvironmentConfig(type="plugin", environment="my_retries:Retries", settings=settings)
    with pytest.raises(ConfigError, match=rf"actors\.environment\.settings\.{next(iter(settings))}"):
        build_environment(config)


def test_leave_one_out():
    groups = [
        [make_trajectory(sample=n, group_size=3, reward=reward) for n, reward in enumerate((1.0, 0.0, 0.5))]
    ]
    [found] = estimate_advantages(settings_of("my_advantage").learner.advantage, groups)
    assert found == pytest.approx([0.75, -0.75, 0.0])


def test_correction_and_loss():
    learner = settings_of("my_loss").learner
    correction = settings_of("my_correction").learner.correction
    behaviour = torch.tensor([-1.0, -1.0, -1.0])
    tokens = LossTokens(
        logprobs=torch.tensor([-1.0, -0.5, -0.2]),
        entropy=torch.zeros(3),
        labels=torch.zeros(3, dtype=torch.int64),
        sequence=torch.zeros(3, dtype=torch.int64),
        sequences=1,
        positions=torch.tensor([1, 2, 3]),
        streams={
            "behaviour_logprobs": behaviour,
            "advantages": torch.tensor([1.0, 2.0, 4.0]),
            "loss_weights": torch.ones(3),
            "group_weights": torch.ones(3),
        },
    )
    losses, sums = token_losses(Objective(loss=learner.loss), tokens)
    assert losses.tolist() == pytest.approx([-1.0, -2.4, -4.8])
    assert sums["clipped_tokens"] == 2
    losses, _ = token_losses(Objective(loss=ReinforceLoss(), correction=correction), tokens)
    assert losses.tolist() == pytest.approx([1.0, 1.0, 0.0])  # the last log ratio, 0.8, is above 0.7


def test_aggregation():
    weigh = aggregation(settings_of("my_aggregation").learner.aggregation)
    weights, denominators = weigh(np.array([4, 16]), np.array([0, 0]))
    assert weights.tolist() == [0.5, 0.25]
    assert denominators.tolist() == [2.0, 4.0]


def test_hooks():
    learner = settings_of("my_hooks").learner
    groups = [[make_trajectory(reward=5.0), make_trajectory(sample=1, reward=1.0)]]
    [found] = with_processed_rewards(groups, learner, exact_sums)
    assert [t.reward for t in found] == [2.0, 1.0]
    cyclic = importlib.import_module("my_hooks").cyclic
    rates = [cyclic(step, groups, learner.optimizer).lr / learner.optimizer.lr for step in (50, 100)]
    assert rates == pytest.approx([0.1, 1.0])
    weights = {"layers.0.w": torch.ones(2), "layers.1.w": torch.ones(2)}
    assert figures_after_step(1, learner, lambda: nullcontext(weights)) == {
        "own_largest": pytest.approx(0.99)
    }
    assert weights["layers.1.w"].tolist() == [1.0, 1.0]


def test_a_declared_stream_is_packed(monkeypatch: pytest.MonkeyPatch):
    assert '`"values": Stream(),`' in PAGE
    monkeypatch.setitem(STREAMS, "values", Stream())
    packed = pack_streams([{"values": np.array([1.0, 2.0, 3.0])}, {"values": 7.0}], [3, 2])
    assert packed["values"].tolist() == [2.0, 3.0, 0.0, 7.0, 0.0]


def test_the_family_is_that_of_qwen2(monkeypatch: pytest.MonkeyPatch):
    name = "learner.backends.megatron.conversion.my_family"
    assert '`ModelFamily(megatron=f"{CONVERSION}.my_family:MY_FAMILY")`' in PAGE
    added, config = example(name.replace(".", "/")), PretrainedConfig(model_type="my_family")
    with pytest.raises(ConfigError, match="model_type='my_family' is unknown"):
        family_of(config)
    monkeypatch.setitem(sys.modules, name, added)
    monkeypatch.setitem(FAMILIES, "my_family", ModelFamily(megatron=f"{name}:MY_FAMILY"))
    assert family_of(config) is added.MY_FAMILY
    assert added.MY_FAMILY.layer_rules == QWEN2.layer_rules
    assert added.MY_FAMILY.qkv_bias
