"""Chats with tools on a scripted engine: turns, ends, wrong calls, tools that fail."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

from actors.engines.base import Sampling
from actors.environments.build import check_environment
from actors.environments.tools import ToolChat
from actors.episodes.episode import Episode
from actors.episodes.errors import EpisodeError, ToolError, ToolFailedError
from actors.episodes.task import Task
from actors.policy.messages import MessagesError
from actors.policy.policy import Policy
from actors.rewards.base import LATER, RewardError
from actors.rewards.scoring.answer_scoring import AnswerScoring
from actors.rewards.scoring.scorers import Scorer
from actors.rollouts.worker import end_after
from actors.settings.actors import ActorsConfig
from actors.settings.agents import AgentConfig
from actors.settings.tool_chat import ToolsConfig
from actors.tools.base import ToolResult
from actors.tools.calculator import Calculator
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError, RequestRefusedError
from bus.process import plugins
from bus.process.plugins import ImportPolicy
from bus.waiting import cancelled
from tests.actors.environments.scripted_tool_chats import (
    LONG,
    TEMPLATE,
    Model,
    environment_of,
    rolled_out,
    tool_tokenizer,
)
from tests.actors.gateway.served import TOKENIZER, encoded


@pytest.fixture(scope="module")
def tokenizer():
    return tool_tokenizer()


def counted(episode, *names):
    return [episode.metrics[f"rollout/{name}"] for name in names]


CALL, ANSWER = "<calculator>6*7</calculator><|end|>", "42<|end|>"


async def test_a_chat_with_a_tool_is_one_trajectory_whose_results_are_not_trained(tokenizer):
    episode, _ = await rolled_out(environment_of(), tokenizer, CALL, ANSWER)
    [trajectory] = episode.trajectories
    text = tokenizer.decode(trajectory.token_ids)
    assert text == f"<|user|>6*7<|assistant|>{CALL}<|user|><result>42</result><|assistant|>{ANSWER}"
    trained = tokenizer.decode(trajectory.token_ids[trajectory.loss_mask])
    assert trained == CALL + ANSWER
    assert (trajectory.reward, trajectory.end, len(trajectory.turns)) == (1.0, "completed", 2)
    assert not np.any(trajectory.behaviour_logprobs[~trajectory.loss_mask])
    assert counted(episode, "reward", "turns", "tool_calls", "tool_failures", "malformed_calls") == [
        1,
        2,
        1,
        0,
        0,
    ]
    assert counted(episode, "completion_tokens", "truncated") == [len(CALL) - 6 + len(ANSWER) - 6, 0]


async def test_an_answer_without_a_call_ends_it(tokenizer):
    episode, model = await rolled_out(environment_of(), tokenizer, ANSWER)
    assert (episode.trajectories[0].reward, len(model.saw)) == (1.0, 1)


async def test_a_system_message_precedes_a_prompt_that_has_none(tokenizer):
    environment = environment_of(system="be brief")
    _, model = await rolled_out(environment, tokenizer, ANSWER)
    assert model.saw == ["<|system|>be brief<|user|>6*7<|assistant|>"]
    policy = Policy(ScriptedEngine(model), tokenizer, Sampling())
    prompt = [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]
    await environment.run(Task(task_id="t", prompt=prompt, label="42"), policy)
    assert model.saw[1] == "<|system|>own<|user|>x<|assistant|>"


async def test_several_calls_are_carried_out_in_order_up_to_a_limit(tokenizer):
    calls = "<calculator>1</calculator> and <calculator>1/0</calculator><calculator>3</calculator><|end|>"
    episode, model = await rolled_out(environment_of(calls_per_turn=2), tokenizer, calls, ANSWER)
    shown = model.saw[1].partition("<|end|>")[2]
    assert shown == (
        "<|user|><result>1</result>\n<result>error: division by zero</result>\n"
        "<result>error: only 2 calls are carried out at a time</result><|assistant|>"
    )
    assert counted(episode, "tool_calls", "tool_failures", "malformed_calls") == [2, 1, 1]


async def test_a_call_that_is_not_closed_is_told_to_the_model_and_counted(tokenizer):
    episode, model = await rolled_out(environment_of(), tokenizer, "<calculator>6*7<|end|>", ANSWER)
    assert "<result>error: <calculator> has no </calculator></result>" in model.saw[1]
    kept = {"tool_calls": 0, "tool_failures": 0, "malformed_calls": 1, "tool_bytes": 0}
    assert [dict(trajectory.metadata) for trajectory in episode.trajectories] == [kept]
    assert counted(episode, "malformed_calls", "turns", "reward") == [1, 2, 1]


async def test_one_that_always_calls_comes_to_the_turn_limit_and_is_scored(tokenizer):
    episode, model = await rolled_out(environment_of(max_turns=3), tokenizer, CALL)
    assert [(t.end, t.reward, t.is_trained) for t in episode.trajectories] == [("turn_limit", 0.0, True)]
    assert (len(model.saw), counted(episode, "tool_calls")) == (3, [2])


async def test_a_completion_may_end_with_its_first_call(tokenizer):
    rambling = "<calculator>6*7</calculator> is 41, so 41<|end|>"
    episode, model = await rolled_out(environment_of(stop_at_call=True), tokenizer, rambling, ANSWER)
    [trajectory] = episode.trajectories
    assert "41" not in model.saw[-1]
    assert "<result>42</result>" in model.saw[-1]
    assert counted(episode, "tool_calls", "malformed_calls") == [1, 0]
    assert (
        tokenizer.decode(trajectory.token_ids[trajectory.loss_mask])
        == f"<calculator>6*7</calculator>{ANSWER}"
    )
    assert trajectory.reward == 1.0
    with pytest.raises(ValueError, match="stop_at_call is for calls"):
        environment_of(calls="native", stop_at_call=True)


INLINE = {"calls": "tags", "stop_at_call": True, "results": "inline", "reward": "final_answer"}
PROGRAM, REST = "so <calculator>6*7</calculator>, then", " =42<|end|>"


async def test_results_within_the_answer_are_context_from_which_it_goes_on(tokenizer):
    episode, model = await rolled_out(environment_of(**INLINE), tokenizer, PROGRAM, REST)
    [trajectory] = episode.trajectories
    before = "<|user|>6*7<|assistant|>so <calculator>6*7</calculator><result>42</result>"
    assert model.saw[-1] == before
    assert tokenizer.decode(trajectory.token_ids) == before + REST
    trained = tokenizer.decode(trajectory.token_ids[trajectory.loss_mask])
    assert trained == f"so <calculator>6*7</calculator>{REST}"
    assert (trajectory.reward, trajectory.end, len(trajectory.turns)) == (1.0, "completed", 2)
    assert counted(episode, "tool_calls", "malformed_calls", "turns") == [1, 0, 2]


async def test_an_answer_with_several_programs_goes_on_after_each_up_to_the_limit(tokenizer):
    environment = environment_of(**INLINE, max_turns=3)
    wrong = "<calculator>6*</calculator>"
    episode, model = await rolled_out(environment, tokenizer, wrong, PROGRAM, REST)
    assert model.saw[-1].startswith(f"<|user|>6*7<|assistant|>{wrong}<result>error: ")
    assert (episode.trajectories[0].reward, counted(episode, "tool_failures")) == (1.0, [1])
    episode, model = await rolled_out(environment, tokenizer, PROGRAM)
    assert (episode.trajectories[0].end, len(model.saw)) == ("turn_limit", 3)


async def test_a_call_that_is_open_when_the_answer_ends_is_not_carried_out(tokenizer):
    episode, model = await rolled_out(environment_of(**INLINE), tokenizer, "<calculator>6*7 =42<|end|>")
    assert (len(model.saw), episode.trajectories[0].reward) == (1, 1.0)
    assert counted(episode, "tool_calls", "malformed_calls") == [0, 1]


def test_results_within_the_answer_need_calls_that_stop_it():
    for settings in ({"calls": "tags"}, {"calls": "native"}):
        with pytest.raises(ValueError, match='results = "inline" needs calls = "tags" and stop_at_call'):
            environment_of(**settings, results="inline")


async def test_a_reward_that_comes_later_is_refused_since_an_episode_may_have_several_trajectories(tokenizer):
    scoring = AnswerScoring(Scorer("later", timeout_s=60, reward=lambda answer: LATER))
    config = ToolsConfig.model_validate({"type": "tools", "tools": [{"type": "calculator"}]})
    environment = ToolChat(config, {"calculator": Calculator("calculator")}, scoring)
    with pytest.raises(RewardError, match="one trajectory an episode"):
        await rolled_out(environment, tokenizer, ANSWER)


async def test_the_token_budget_counts_over_turns(tokenizer):
    tokens = len(tokenizer.encode(CALL))
    environment = environment_of(token_budget=tokens + 3)
    episode, _ = await rolled_out(environment, tokenizer, CALL, "42 is it<|end|>")
    [trajectory] = episode.trajectories
    assert (trajectory.end, int(trajectory.loss_mask.sum())) == ("length", tokens + 3)
    episode, model = await rolled_out(environment_of(token_budget=tokens), tokenizer, CALL)
    assert (episode.trajectories[0].end, len(model.saw), counted(episode, "truncated")) == ("length", 1, [1])


async def test_a_cut_completion_ends_the_chat_and_calls_nothing(tokenizer):
    tokens = len(tokenizer.encode(CALL))
    cut = Sampling(max_new_tokens=tokens - 1)
    episode, model = await rolled_out(environment_of(), tokenizer, CALL, sampling=cut)
    assert (episode.trajectories[0].end, len(model.saw), counted(episode, "tool_calls")) == ("length", 1, [0])


class SmallContext(ScriptedEngine):
    async def generate(self, request):
        if len(request.token_ids) > 60:
            raise RequestRefusedError("does not fit the context")
        return await super().generate(request)


async def test_a_chat_that_fills_the_context_ends_as_length_and_a_prompt_that_does_is_refused(tokenizer):
    model = Model(tokenizer, CALL)
    policy = Policy(SmallContext(model), tokenizer, Sampling(max_new_tokens=100))
    episode = await environment_of().run(Task(task_id="t", prompt="6*7", label="42"), policy)
    assert [(t.end, t.reward) for t in episode.trajectories] == [("length", 0.0)]
    with pytest.raises(RequestRefusedError):
        await environment_of().run(Task(task_id="t", prompt="6" * 99, label="42"), policy)


class Tool:
    """A tool of the user's that does what it is told."""

    name, description = "tool", "Does what it is told."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"x": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    result = ToolResult("done")

    async def call(self, arguments):
        if isinstance(self.result, BaseException):
            raise self.result
        if callable(self.result):
            return await self.result()
        return self.result

    async def close(self):
        pass


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setitem(sys.modules, "users_tools", sys.modules[__name__])

    def build(result, **settings):
        monkeypatch.setattr(Tool, "result", staticmethod(result) if callable(result) else result)
        return environment_of({"type": "plugin", "tool": "users_tools:Tool"}, **settings)

    return build


async def hang():
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (ToolError("no connection"), "no connection"),
        (KeyError("x"), r"the tool 'tool' raised KeyError\('x'\)"),
        (TimeoutError(), "raised TimeoutError"),
        (SystemExit(2), "raised SystemExit"),
        (ExceptionGroup("several", [OSError()]), "raised ExceptionGroup"),
        (hang, "took longer than 0.05 s"),
        (None, "returned NoneType"),
        ("text", "returned str"),
        (ToolResult(None), "returned ToolResult"),
    ],
)
async def test_a_tool_that_fails_ends_the_episode_as_tool_error_and_not_with_a_reward(
    told, tokenizer, result, said
):
    environment = told(result, tool_timeout_s=0.05)
    with pytest.raises(ToolError, match=said) as raised:
        await rolled_out(environment, tokenizer, "<tool>x</tool><|end|>")
    assert end_after(raised.value) == "tool_error"


@pytest.mark.parametrize(
    "result",
    [KeyError("x"), TimeoutError(), hang, None, ToolFailedError("MCP server s: died"), ToolError("away")],
)
async def test_a_call_that_makes_a_tool_fail_which_works_is_a_failed_call_unless_the_tool_says_otherwise(
    told, tokenizer, monkeypatch, result
):
    environment = told(ToolResult("done"), tool_timeout_s=1.0)
    talk = "<tool>x</tool><|end|>", ANSWER
    await rolled_out(environment, tokenizer, *talk)
    monkeypatch.setattr(Tool, "result", staticmethod(result) if callable(result) else result)
    if type(result) is ToolError:
        with pytest.raises(ToolError, match="away"):
            await rolled_out(environment, tokenizer, *talk)
        return
    episode, model = await rolled_out(environment, tokenizer, *talk)
    assert (episode.trajectories[0].reward, counted(episode, "tool_failures")) == (1.0, [1])
    assert "error: the tool failed on these arguments" in model.saw[-1]


async def test_a_chat_whose_tools_took_its_time_is_scored_where_others_end_in_time(
    told, tokenizer, monkeypatch
):
    environment = told(ToolResult("done"), timeout_s=1.5)
    await rolled_out(environment, tokenizer, "<tool>x</tool><|end|>", ANSWER)
    monkeypatch.setattr(Tool, "result", staticmethod(hang))
    episode, _ = await rolled_out(environment, tokenizer, "<tool>x</tool><|end|>")
    assert [(t.end, t.reward, t.is_trained) for t in episode.trajectories] == [("turn_limit", 0.0, True)]


async def test_a_chat_that_the_template_refuses_since_a_turn_is_scored(told):
    tokenizer = tool_tokenizer()
    refusing = "{% for m in messages %}{% if 'wrong' in m.content %}{{ raise_exception('no') }}{% endif %}"
    tokenizer.chat_template = refusing + "{% endfor %}" + TEMPLATE
    environment = told(ToolResult("what is wrong"))
    episode, model = await rolled_out(environment, tokenizer, "<tool>x</tool><|end|>")
    assert [(t.end, t.reward, t.is_trained) for t in episode.trajectories] == [("completed", 0.0, True)]
    assert len(model.saw) == 1
    with pytest.raises(MessagesError):
        await rolled_out(environment, tokenizer, ANSWER, task=Task(task_id="t", prompt="wrong"))


async def test_an_episode_that_takes_too_long_ends_as_timeout(told, tokenizer):
    environment = told(hang, timeout_s=0.05)
    with pytest.raises(EpisodeError, match=r"took longer than 0\.05 s") as raised:
        await rolled_out(environment, tokenizer, "<tool>x</tool><|end|>")
    assert end_after(raised.value) == "timeout"


async def test_its_tools_are_closed_with_it_and_also_after_a_check(told, monkeypatch):
    closed = []

    async def close(self):
        closed.append(self)

    monkeypatch.setattr(Tool, "close", close)
    await told(ToolResult("done")).close()
    assert len(closed) == 1
    config = {"type": "tools", "tools": [{"type": "plugin", "tool": "users_tools:Tool"}]}
    await check_environment(ActorsConfig(environment=ToolsConfig.model_validate(config)))
    assert len(closed) == 2


def test_the_reward_that_needs_reasoning_is_refused():
    for rewards in ({"reward": "deepscaler"}, {"rewards": ("deepscaler",)}):
        with pytest.raises(ValueError, match="use math"):
            environment_of(**rewards)
        with pytest.raises(ValueError, match="use math"):
            AgentConfig(**{"command": "true", "reward": "exact", **rewards})


def test_packages_that_a_strangers_record_names_are_refused(monkeypatch):
    monkeypatch.setattr(plugins, "_policy", ImportPolicy(refusal="comes from a stranger"))
    with pytest.raises(ConfigError, match="the package 'antigravity' comes from a stranger"):
        environment_of({"type": "python", "packages": ["antigravity"]})


async def test_a_tools_output_of_100_mb_is_cut(told, tokenizer):
    environment = told(ToolResult("x" * 100_000_000), output_characters=16)
    _, model = await rolled_out(environment, tokenizer, "<tool>x</tool><|end|>", ANSWER)
    assert f"<result>{'x' * 8}\n[99999984 characters left out]\n{'x' * 8}</result>" in model.saw[1]


def native(name, arguments):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>{{"name": "{name}", "arguments": {text}}}</tool_call><|end|>'


async def test_native_calls_come_from_the_policy_and_results_go_back_by_their_ids(told, tokenizer):
    environment = told(ToolResult("done"), calls="native")
    model = Model(tokenizer, native("tool", {"x": "a", "n": 2}), ANSWER)
    policy = Policy(ScriptedEngine(model), tokenizer, Sampling(max_new_tokens=200))
    episode = await environment.run(Task(task_id="t", prompt="go", label="42"), policy)
    assert model.saw[0] == "<|system|>tool <|user|>go<|assistant|>"  # the template is told of the tools
    assert model.saw[1].endswith("</tool_call><|end|><|tool|>done<|assistant|>")
    [trajectory] = episode.trajectories
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (native("tol", {"x": "a"}), "<|tool|>error: there is no tool 'tol'; there are: tool"),
        (native("tool", {}), "<|tool|>error: tool: the argument 'x' is missing"),
        (native("tool", {"x": 1}), "the argument 'x' is 1, which is not of type string"),
        (native("tool", {"x": "a", "n": True}), "the argument 'n' is True, which is not of type integer"),
        (native("tool", {"x": "a", "n": 1.5}), "the argument 'n' is 1.5"),
        (native("tool", {"x": "a", "y": 1}), "there is no argument 'y'; there are: x, n"),
        (native("tool", [1]), "error"),
        ("<tool_call>{not json}</tool_call><|end|>", "<|user|>error: this is no tool call"),
    ],
)
async def test_wrong_native_calls_are_told_to_the_model_and_counted(told, tokenizer, call, said):
    environment = told(ToolError("was called"), calls="native")
    model = Model(tokenizer, call, ANSWER)
    policy = Policy(ScriptedEngine(model), tokenizer, Sampling(max_new_tokens=200))
    episode = await environment.run(Task(task_id="t", prompt="go", label="42"), policy)
    assert said in model.saw[1]
    assert counted(episode, "malformed_calls", "tool_calls", "reward") == [1, 0, 1]


def test_tags_need_tools_of_one_text(told):
    assert isinstance(told(ToolResult("")), ToolChat)
    Tool.parameters["required"].append("n")
    try:
        with pytest.raises(ConfigError, match="'tool' does not take exactly one text"):
            told(ToolResult(""))
    finally:
        Tool.parameters["required"].remove("n")


async def test_a_program_is_written_run_and_answered(tokenizer):
    environment = environment_of({"type": "python"}, reward="last_number")
    code = "<python>n = 1\nfor k in range(2, 6): n *= k\nprint(n)</python><|end|>"
    episode, model = await rolled_out(environment, tokenizer, code, "it is 120<|end|>", label="120")
    assert "<result>120</result>" in model.saw[1]
    assert episode.trajectories[0].reward == 1.0


async def test_call_that_waits_for_its_turn_is_not_said_to_have_failed_by_its_arguments():
    tool = {"type": "python", "at_once": 1, "wall_s": 0.5}
    chat = ToolChat.from_config(ToolsConfig(type="tools", tools=[tool], tool_timeout_s=2.0))

    async def episode(code: str) -> Episode:
        call = f'<tool_call>{{"name": "python", "arguments": {{"code": "{code}"}}}}</tool_call>'
        answers = iter([call])
        engine = ScriptedEngine(lambda _: encoded(f"{next(answers, 'done')}<|im_end|>"))
        task = Task(task_id="t", prompt="x", label="done")
        return await chat.run(task, Policy(engine, TOKENIZER, Sampling(max_new_tokens=200)))

    try:
        assert (await episode("print(1)")).trajectories[0].reward == 1.0
        crowd = [episode("while True: pass") for _ in range(8)]
        outcomes = await asyncio.gather(*crowd, return_exceptions=True)
        failed = [one for one in outcomes if not isinstance(one, Episode)]
        assert len(failed) > 1
        assert all("waited for 2 s" in str(one) for one in failed)
    finally:
        await chat.close()


class Notes:
    """A tool of the user's that keeps notes for each episode, and may break, hang, or wait for others."""

    name, description = "tool", "Keeps notes."
    parameters = Tool.parameters
    open = 0
    opened = 0
    meeting: asyncio.Barrier
    """Of two calls: each goes on once the other has come."""
    has_opened: asyncio.Event

    async def call(self, arguments):
        raise AssertionError("each episode has a state")

    @asynccontextmanager
    async def episode(self, task):
        Notes.open += 1
        Notes.opened += 1
        Notes.has_opened.set()
        async with asyncio.TaskGroup():  # it wants to be left by the task that entered it
            try:
                yield NotesOfEpisode()
            finally:
                Notes.open -= 1

    async def close(self):
        pass


class NotesOfEpisode:
    def __init__(self):
        self.notes = []

    async def call(self, tool, arguments):
        self.notes.append(arguments["x"])
        if arguments["x"] == "break":
            raise KeyError("x")
        if arguments["x"] == "hang":
            await hang()
        if arguments["x"] == "meet":
            await Notes.meeting.wait()
        return ToolResult(f"{tool}:{'+'.join(self.notes)}")


@pytest.fixture
def notes(monkeypatch):
    monkeypatch.setitem(sys.modules, "users_tools", sys.modules[__name__])
    for name in ("open", "opened"):
        monkeypatch.setattr(Notes, name, 0)
    monkeypatch.setattr(Notes, "meeting", asyncio.Barrier(2), raising=False)
    monkeypatch.setattr(Notes, "has_opened", asyncio.Event(), raising=False)
    return partial(environment_of, {"type": "plugin", "tool": "users_tools:Notes"})


def noted(*texts):
    return "".join(f"<tool>{text}</tool>" for text in texts) + "<|end|>"


async def test_a_tool_keeps_a_state_for_each_episode_which_ends_with_it(notes, tokenizer):
    environment = notes()
    talks = [rolled_out(environment, tokenizer, noted(x), noted("b", "c"), ANSWER) for x in "ad"]
    for (episode, model), x in zip(await asyncio.gather(*talks), "ad", strict=True):
        assert f"<result>tool:{x}</result>" in model.saw[1]
        assert f"<result>tool:{x}+b</result>\n<result>tool:{x}+b+c</result>" in model.saw[2]
        assert counted(episode, "tool_bytes", "tool_calls") == [6 + 8 + 10, 3]
    assert (Notes.opened, Notes.open) == (2, 0)
    await rolled_out(environment, tokenizer, ANSWER)
    assert Notes.opened == 2  # an episode that calls nothing opens nothing


@pytest.mark.parametrize("fault", ["break", "hang"])
async def test_a_tool_that_breaks_or_hangs_is_started_again_and_other_episodes_keep_their_state(
    notes, tokenizer, fault
):
    environment = notes(tool_timeout_s=1.0)
    other, go_on = Model(tokenizer, noted("a"), noted("b"), ANSWER), asyncio.Event()

    async def later(request):
        if len(other.saw) == 1:
            await go_on.wait()
        return await ScriptedEngine.generate(engine, request)

    engine = ScriptedEngine(other)
    slow = type("Slow", (), {"generate": staticmethod(later), "__getattr__": lambda _, n: getattr(engine, n)})
    meanwhile = asyncio.create_task(
        environment.run(Task(task_id="o", prompt="x", label="42"), Policy(slow(), tokenizer, LONG))
    )
    _, model = await rolled_out(environment, tokenizer, noted("a"), noted(fault), noted("c"), ANSWER)
    assert (
        "<result>error: the tool failed on these arguments, and what it kept is gone</result>" in model.saw[2]
    )
    assert "<result>tool:c</result>" in model.saw[3]
    go_on.set()
    await meanwhile
    assert "<result>tool:a+b</result>" in other.saw[2]
    assert (Notes.opened, Notes.open) == (3, 0)


async def test_a_state_is_closed_when_its_episode_is_cancelled_or_its_tool_ends_it(notes, tokenizer):
    task = asyncio.create_task(rolled_out(notes(), tokenizer, noted("hang"), ANSWER))
    await asyncio.wait_for(Notes.has_opened.wait(), 20)
    await cancelled(task)
    assert (Notes.opened, Notes.open) == (1, 0)
    with pytest.raises(ToolError, match="raised KeyError"):
        await rolled_out(notes(), tokenizer, noted("break"))
    assert (Notes.opened, Notes.open) == (2, 0)


async def test_calls_of_a_turn_run_side_by_side_if_asked_and_their_results_keep_their_order(notes, tokenizer):
    together = noted("meet", "meet"), ANSWER
    _, model = await rolled_out(notes(parallel_calls=True), tokenizer, *together)
    assert model.saw[1].count("<result>tool:meet") == 2
    _, model = await rolled_out(notes(parallel_calls=True), tokenizer, noted("meet", "b", "meet"), ANSWER)
    assert [part[:6] for part in model.saw[1].split("<result>tool:")[1:]] == ["meet+b", "meet+b", "meet+b"]
    with pytest.raises(ToolError, match="took longer"):  # one after the other they never meet
        await rolled_out(notes(tool_timeout_s=0.1), tokenizer, *together)
