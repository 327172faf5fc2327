"""How contexts that depart from a strand are healed, realigned or forked, and what is no chat at all."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.engines.base import Sampling
from actors.episodes.episode import Fork
from actors.policy import chat_messages
from actors.policy.chat_format import SHORT_CHARACTERS
from actors.policy.conversation import Conversation
from actors.policy.messages import MessagesError
from actors.policy.policy import Policy
from benchmarks.scripted_engine import ScriptedEngine
from tests.actors.policy.families import FAMILIES, QWEN3, TOOLS, tokenizer_of
from tests.published_chats import CHATS, tokenizer_of_chat

QWEN = FAMILIES["qwen3"].tokenizer
SYSTEM = {"role": "system", "content": "Be brief"}
ONE = {"role": "user", "content": "one"}
TWO = {"role": "user", "content": "two"}


def scripted(*answers: str, tokenizer=QWEN, **settings) -> Policy:
    replies = iter(answers)
    engine = ScriptedEngine(lambda _: tokenizer.encode(next(replies), add_special_tokens=False))
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return Policy(engine, tokenizer, Sampling(stop_token_ids=(stop,)), **settings)


def text_of(trajectory) -> str:
    return QWEN.decode(trajectory.token_ids, skip_special_tokens=False)


CALL = (
    '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    "<|im_end|>"
)


async def called(policy: Policy, tools=TOOLS) -> list[dict]:
    """A first turn in which the policy calls a tool, and what the tool answers."""
    first = await policy.chat([ONE], tools=tools)
    return [ONE, first.message, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}]


@pytest.mark.parametrize("written", ["a<|im_end|>", "a\n<|im_end|>", "a\n \n<|im_end|>"])
async def test_an_answer_ends_once_where_the_template_writes_space_before_its_end(written):
    """Apriel and Laguna write so; what the policy wrote before its end stands as it is."""
    template = QWEN3.replace("THINK", "false").replace(
        "{{ calls(message) }}{{ '<|im_end|>\\n' }}", "{{ calls(message) }}{{ '\\n<|im_end|>\\n' }}"
    )
    assert template.count("'\\n<|im_end|>\\n'") == 1
    policy = scripted(written, written, tokenizer=tokenizer_of(template, "<|im_end|>"))
    first = await policy.chat([ONE])
    await policy.chat([ONE, first.message, TWO])
    [trajectory] = policy.trajectories(0.0)
    asked = ["<|im_start|>user\none<|im_end|>\n", "\n<|im_start|>user\ntwo<|im_end|>\n"]
    begun = "<|im_start|>assistant\n"
    assert text_of(trajectory) == f"{asked[0]}{begun}{written}{asked[1]}{begun}{written}"


async def test_messages_that_are_written_otherwise_are_healed_and_counted():
    policy = scripted(CALL, "3<|im_end|>", "3<|im_end|>")
    _, answer, tool = await called(policy)
    [call] = answer["tool_calls"]
    call = {**call, "function": {"name": "add", "arguments": '{"b":2,  "a":1}'}}
    told = [
        {"role": "user", "content": [{"type": "text", "text": "on"}, {"type": "text", "text": "e\r\n"}]},
        {**answer, "content": None, "reasoning": " hm\n", "tool_calls": [call], "annotations": []},
        tool,
    ]
    del told[1]["reasoning_content"]
    await policy.chat(told, tools=TOOLS)
    [trajectory] = policy.trajectories(0.0)
    assert trajectory.metadata == {"healed_messages": 2}
    assert len(trajectory.turns) == 2
    repeated = [*told, {"role": "assistant", "content": "3"}, TWO]
    await policy.chat(repeated, tools=TOOLS)
    [trajectory] = policy.trajectories(0.0)
    assert trajectory.metadata == {"healed_messages": 2}  # each message counts once


@pytest.mark.parametrize("way", ["without reasoning", "as text"])
async def test_an_answer_that_is_repeated_with_less_is_realigned(way):
    policy = scripted(CALL, "3<|im_end|>")
    first, answer, tool = await called(policy)
    text = CALL.removesuffix("<|im_end|>")
    less = {key: value for key, value in answer.items() if key != "reasoning_content"}
    told = less if way == "without reasoning" else {"role": "assistant", "content": text}
    await policy.chat([first, told, tool], tools=TOOLS)
    [trajectory] = policy.trajectories(0.0)
    assert trajectory.metadata == {"realigned_messages": 1}
    tail = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert text_of(trajectory).endswith(CALL + tail + "3<|im_end|>")


CHANGES = {
    "other reasoning": lambda m: [m[0], {**m[1], "reasoning_content": "no"}, m[2]],
    "other content": lambda m: [m[0], {**m[1], "content": "no"}, m[2]],
    "other arguments": lambda m: [
        m[0],
        {**m[1], "tool_calls": [{**m[1]["tool_calls"][0], "function": {"name": "add", "arguments": "{}"}}]},
        m[2],
    ],
    "no calls": lambda m: [m[0], {"role": "assistant", "content": ""}, m[2]],
    "other question": lambda m: [TWO, *m[1:]],
    "new system message": lambda m: [SYSTEM, *m],
    "another role": lambda m: [{**m[0], "role": "system"}, *m[1:]],
    "a name": lambda m: [{**m[0], "name": "Ann"}, *m[1:]],
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_history_of_another_meaning_is_rendered_anew_and_forked(change):
    policy = scripted(CALL, "3<|im_end|>")
    told = CHANGES[change](await called(policy))
    await policy.chat(told, tools=TOOLS)
    first, second = policy.trajectories(0.0)
    assert (len(first.turns), len(second.turns)) == (1, 1)
    rendered = QWEN.apply_chat_template(
        chat_messages.checked_messages(told), tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert text_of(second) == rendered + "3<|im_end|>"
    assert second.metadata == {}


async def test_other_tools_are_another_prompt():
    policy = scripted(CALL, "3<|im_end|>")
    told = await called(policy)
    await policy.chat(told, tools=TOOLS[:1])
    assert len(policy.trajectories(0.0)) == 2


async def test_a_fork_keeps_the_sampled_tokens_that_it_shares():
    thought = "<think>\nso\n</think>\n\nyes<|im_end|>"
    policy = scripted(thought, "a<|im_end|>", "b<|im_end|>", "c<|im_end|>")
    first = await policy.chat([ONE])
    begun = [ONE, first.message, TWO]
    second = await policy.chat(begun)
    await policy.chat([*begun, second.message, ONE])
    other = {"role": "user", "content": "other"}
    await policy.chat([ONE, first.message, other])  # back to after the first answer
    grown, back = policy.trajectories(0.0)
    common = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n" + thought + "\n<|im_start|>user\n"
    assert text_of(back) == common + "other<|im_end|>\n<|im_start|>assistant\nc<|im_end|>"
    assert [len(grown.turns), len(back.turns)] == [3, 1]
    assert back.fork == Fork(0, len(QWEN.encode(common, add_special_tokens=False)))
    assert back.loss_mask.sum() == 2  # the shared answer is trained on once


async def test_a_fork_goes_on_and_can_be_forked_again():
    policy = scripted(*(f"<think>\n{n}\n</think>\n\n{n}<|im_end|>" for n in "abcde"))
    messages = [ONE]
    for question in (TWO, ONE):
        messages += [(await policy.chat(messages)).message, question]
    await policy.chat([*messages[:2], {"role": "user", "content": "other"}])
    forked = [*messages[:2], {"role": "user", "content": "other"}]
    forked += [{"role": "assistant", "content": "c", "reasoning_content": "c"}, TWO]
    await policy.chat(forked)
    await policy.chat([*messages[:2], {"role": "user", "content": "third"}])
    trajectories = policy.trajectories(0.0)
    assert [len(t.turns) for t in trajectories] == [2, 2, 1]
    assert all("<think>\na\n</think>\n\na" in text_of(t) for t in trajectories)


async def test_a_turn_that_is_asked_for_again_is_forked_where_the_answers_differ():
    policy = scripted("ab<|im_end|>", "ac<|im_end|>", "x<|im_end|>")
    first = await policy.chat([ONE])
    again = await policy.chat([ONE])
    await policy.chat([ONE, again.message, TWO])
    one, two = policy.trajectories(0.0)
    assert (len(one.turns), len(two.turns)) == (1, 2)
    assert two.fork == Fork(0, one.turns[0].start)
    assert [first.content, again.content] == ["ab", "ac"]


async def test_equal_answers_of_several_strands_are_told_apart_by_their_reasoning():
    policy = scripted(
        "<think>\na\n</think>\n\n4<|im_end|>", "<think>\nb\n</think>\n\n4<|im_end|>", "x<|im_end|>"
    )
    first = await policy.chat([ONE])
    await policy.chat([ONE])
    await policy.chat([ONE, first.message, TWO])
    assert [len(trajectory.turns) for trajectory in policy.trajectories(0.0)] == [2, 1]


async def test_calls_at_the_same_time_from_one_history_share_it():
    policy = scripted("a<|im_end|>", "b<|im_end|>", "c<|im_end|>", "d<|im_end|>")
    first = await policy.chat([ONE])
    questions = [{"role": "user", "content": text} for text in ("x", "y", "z")]
    await asyncio.gather(*(policy.chat([ONE, first.message, question]) for question in questions))
    trajectories = policy.trajectories(0.0)
    assert sorted(len(trajectory.turns) for trajectory in trajectories) == [1, 1, 2]
    assert sorted(int(trajectory.loss_mask.sum()) for trajectory in trajectories) == [2, 2, 4]
    assert all(trajectory.fork == Fork(0, trajectory.fork.token) for trajectory in trajectories[1:])


async def test_messages_that_the_environment_changes_later_are_noticed():
    policy = scripted("a<|im_end|>", "b<|im_end|>")
    messages = [dict(ONE)]
    messages.append(dict((await policy.chat(messages)).message))
    messages[0]["content"] = "changed"
    await policy.chat([*messages, TWO])
    assert len(policy.trajectories(0.0)) == 2


async def test_a_turn_may_end_by_another_token_than_the_template_writes():
    policy = scripted("a<|eot_id|>", "b<|im_end|>")
    first = await policy.chat([ONE])
    await policy.chat([ONE, first.message, TWO])
    [trajectory] = policy.trajectories(0.0)
    assert "assistant\na<|eot_id|>\n<|im_start|>user\ntwo" in text_of(trajectory)


async def test_a_prompt_may_open_the_reasoning():
    opened = tokenizer_of(QWEN3.replace("THINK", "false") + "{{ '<think>\\n' }}", "<|im_end|>")
    policy = scripted("hm\n</think>\n\n4<|im_end|>", "so\n</think>\n\n5<|im_end|>", tokenizer=opened)
    first = await policy.chat([ONE])
    assert (first.reasoning, first.content, first.text) == ("hm", "4", "hm\n</think>\n\n4")
    second = await policy.chat([ONE, first.message, TWO])
    assert (second.reasoning, second.content) == ("so", "5")
    assert len(policy.trajectories(0.0)) == 1


async def test_a_template_that_hides_answers_is_rendered_as_a_whole():
    hiding = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    policy = scripted("a<|im_end|>", "b<|im_end|>", tokenizer=tokenizer_of(hiding, "<|im_end|>"))
    first = await policy.chat([ONE])
    await policy.chat([ONE, first.message, TWO])
    assert [QWEN.decode(t.token_ids) for t in policy.trajectories(0.0)] == [
        "onea<|im_end|>",
        "onetwob<|im_end|>",
    ]


async def test_only_the_tail_is_rendered_and_encoded(monkeypatch):
    policy = scripted("a<|im_end|>", "b<|im_end|>")
    long = {"role": "user", "content": "one" * 10_000}
    first = await policy.chat([long])
    rendered, encoded = [], []
    render, encode = QWEN.apply_chat_template, QWEN.encode
    monkeypatch.setattr(
        QWEN, "apply_chat_template", lambda *a, **k: (text := render(*a, **k), rendered.append(len(text)))[0]
    )
    monkeypatch.setattr(QWEN, "encode", lambda text, **k: (encoded.append(len(text)), encode(text, **k))[1])
    await policy.chat([long, first.message, TWO])
    assert len(policy.trajectories(0.0)) == 1
    assert max(rendered + encoded) < 1000, "and not the long message"


async def test_what_an_answer_says_is_read_once_and_only_where_its_chat_goes_on(monkeypatch):
    answered, read = Conversation.answered, []

    def noted(self, chat, answer, text, **given):
        read.append(text)
        return answered(self, chat, answer, text, **given)

    monkeypatch.setattr(Conversation, "answered", noted)
    policy = scripted("a<|im_end|>", "b<|im_end|>", "c<|im_end|>", "d<|im_end|>")
    first = await policy.chat([ONE])
    assert read == []
    second = await policy.chat([ONE, first.message, TWO])
    await policy.chat([ONE, first.message, TWO, second.message, ONE])
    await policy.chat([TWO])
    assert read == ["a", "b", "c"]
    assert [len(one.turns) for one in policy.trajectories(0.0)] == [3, 1]


async def test_tokens_can_be_made_while_the_event_loop_goes_on(monkeypatch):
    policy = scripted("a<|im_end|>")
    loop, render, waiting = asyncio.get_running_loop(), QWEN.apply_chat_template, asyncio.Event()

    def render_when_the_loop_answers(*args, **kwargs):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)
        loop.call_soon_threadsafe(waiting.set)
        return render(*args, **kwargs)

    monkeypatch.setattr(QWEN, "apply_chat_template", render_when_the_loop_answers)
    await policy.chat([{"role": "user", "content": "one " * SHORT_CHARACTERS}])
    assert waiting.is_set()


BAD = {
    "a chat without messages": [],
    "message 1 has no role": [ONE, {"content": "x"}],
    "message 0 has no role": [{"role": "", "content": "x"}],
    "message 0 is str, and no object": ["hello"],
    "content of message 0 is int": [{"role": "user", "content": 5}],
    "content of message 0 is dict": [{"role": "user", "content": {"text": "x"}}],
    "message 0 shows an image, and the model reads nothing but text": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    ],
    "part of message 0 is 'int'": [{"role": "user", "content": [3]}],
    "tool_calls of message 0 is str": [{"role": "assistant", "tool_calls": "add"}],
    "tool call of message 0 has no name": [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    "tool call of message 0 is no object": [{"role": "assistant", "tool_calls": [3]}],
    "must be JSON": [{"role": "user", "content": "x", "score": np.float32(1)}],
    "more than 1,000 fit into no context": [{"role": "tool", "content": "x" * 1001}],
}


@pytest.mark.parametrize("wrong", BAD)
async def test_what_is_no_chat_is_refused_with_the_reason(wrong, monkeypatch):
    monkeypatch.setattr(chat_messages, "MOST_CHARACTERS", 1000)
    policy = scripted("a<|im_end|>")
    with pytest.raises(MessagesError, match=wrong):
        await policy.chat(BAD[wrong])
    assert policy.trajectories(0.0) == ()
    assert (await policy.chat([ONE])).content == "a"


@pytest.mark.parametrize("tools", [["add"], [{}], [{"function": {"name": ""}}], [{"name": "add"}]])
async def test_what_is_no_tool_is_refused(tools):
    with pytest.raises(MessagesError, match="is no tool"):
        await scripted("a<|im_end|>").chat([ONE], tools=tools)


async def test_messages_that_the_template_refuses_are_named_so():
    policy = scripted("a<|im_end|>", tokenizer=FAMILIES["mistral"].tokenizer)
    with pytest.raises(MessagesError, match="the chat template refuses these messages: roles must alternate"):
        await policy.chat([ONE, TWO])


async def test_half_a_surrogate_pair_becomes_a_replacement_character():
    policy = scripted("a<|im_end|>")
    await policy.chat([{"role": "user", "content": "x\ud800y"}])
    assert "x\ufffdy" in text_of(policy.trajectories(0.0)[0])


async def test_arguments_of_clients_that_are_no_json_reach_the_template_as_they_are():
    policy = scripted("a<|im_end|>")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": '}}
    await policy.chat([ONE, {"role": "assistant", "tool_calls": [call]}, TWO])
    assert '"arguments": {"a": }' in text_of(policy.trajectories(0.0)[0])


async def test_special_marks_of_calls_are_read_though_text_leaves_them_out():
    mistral = FAMILIES["mistral"].tokenizer
    policy = scripted('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>', tokenizer=mistral)
    policy.sampling = replace(policy.sampling, stop_token_ids=(mistral.convert_tokens_to_ids("</s>"),))
    answer = await policy.chat([ONE], tools=TOOLS)
    assert [call.name for call in answer.tool_calls] == ["add"]
    assert answer.text == ' [{"name": "add", "arguments": {"a": 1}}]'


async def test_the_format_of_tool_calls_can_be_set():
    policy = scripted('[TOOL_CALLS]add[ARGS]{"a": 1}<|im_end|>', tool_calls="mistral")
    answer = await policy.chat([ONE], tools=TOOLS)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("add", '{"a": 1}')]


async def test_a_template_for_single_calls_goes_on_after_two():
    llama = FAMILIES["llama3"].tokenizer
    call = '{"name": "add", "parameters": {"a": 1}}'
    policy = scripted(f"{call}; {call}<|eot_id|>", "ok<|eot_id|>", tokenizer=llama)
    first = await policy.chat([ONE], tools=TOOLS)
    answers = [{"role": "tool", "content": call.id, "tool_call_id": call.id} for call in first.tool_calls]
    await policy.chat([ONE, first.message, *answers], tools=TOOLS)
    [trajectory] = policy.trajectories(0.0)
    heads = [f'<|start_header_id|>ipython<|end_header_id|>\n\n"00000000{n}"<|eot_id|>' for n in (0, 1)]
    tail = "".join(heads) + "<|start_header_id|>assistant<|end_header_id|>\n\nok<|eot_id|>"
    text = llama.decode(trajectory.token_ids, skip_special_tokens=False)
    assert text.endswith(f"{call}; {call}<|eot_id|>" + tail)


WITHIN_THE_TURN = """{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '(' + call.function.name + ')' }}{% endfor %}
{%- for other in messages if message.tool_calls and other.role == 'tool' %}{{ '[' + other.content + ']' }}
{%- endfor %}{% if not message.tool_calls %}{{ '<|im_end|>' }}{% endif %}
{%- elif message.role == 'user' %}{{ '<|user|>' + message.content }}{% endif %}{% endfor %}"""


async def test_a_tools_answer_that_is_rendered_only_behind_its_call_is_not_lost():
    tokenizer = tokenizer_of(WITHIN_THE_TURN, "<|im_end|>")
    policy = scripted(CALL, "ok<|im_end|>", tokenizer=tokenizer)
    told = await called(policy)
    await policy.chat(told, tools=TOOLS)
    _, second = policy.trajectories(0.0)
    assert tokenizer.decode(second.token_ids) == "<|user|>one<|im_start|>(add)[3]ok<|im_end|>"


async def test_a_template_may_want_arguments_as_text():
    template = QWEN3.replace("THINK", "true").replace(
        "{{- call.arguments if call.arguments is string else call.arguments | tojson }}",
        "{{- '' + call.arguments }}",
    )
    tokenizer = tokenizer_of(template, "<|im_end|>")
    policy = scripted(CALL, "ok<|im_end|>", "ok<|im_end|>", tokenizer=tokenizer)
    told = await called(policy)
    await policy.chat(told, tools=TOOLS)
    await policy.chat([SYSTEM, *told], tools=TOOLS)
    grown, anew = policy.trajectories(0.0)
    assert (len(grown.turns), len(anew.turns)) == (2, 1)
    assert '"arguments": {"a": 1, "b": 2}}' in tokenizer.decode(anew.token_ids)


async def test_a_template_that_does_not_show_the_tools_is_warned_of_once():
    silent = tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}", "<|im_end|>")
    policy = scripted("a<|im_end|>", "b<|im_end|>", tokenizer=silent)
    with capture_logs() as logs:
        await policy.chat([ONE], tools=TOOLS)
        await policy.fresh("other").chat([TWO], tools=TOOLS)
    assert [entry["event"] for entry in logs] == ["tools_not_in_prompt"]


async def test_what_gpt_oss_ends_its_answer_with_is_the_history_s_end_in_the_next_turn():
    """<|return|> never stands in a prompt: the next turn forks from the trajectory that sampled it."""
    tokenizer = tokenizer_of_chat(CHATS["gpt-oss"])
    policy = scripted(
        "<|channel|>final<|message|>a<|return|>", "b<|return|>", "c<|return|>", tokenizer=tokenizer
    )
    chat = [ONE]
    for _ in range(3):
        chat = [*chat, (await policy.chat(chat)).message, TWO]
    texts = [tokenizer.decode(one.token_ids) for one in policy.trajectories(0.0)]
    asked = "<|start|>user<|message|>two<|end|><|start|>assistant"
    first = "<|start|>user<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>a"
    assert texts == [
        f"{first}<|return|>",
        f"{first}<|end|>{asked}b<|return|>",
        f"{first}<|end|>{asked}b<|end|>{asked}c<|return|>",
    ]
    trained = [tokenizer.decode(one.token_ids[one.loss_mask]) for one in policy.trajectories(0.0)]
    assert trained == ["<|channel|>final<|message|>a<|return|>", "b<|return|>", "c<|return|>"]
