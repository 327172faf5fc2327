"""How models write tool calls: a table of formats, each with its marks and its reader."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actors.policy.call_readers import (
    FunctionCalls,
    JsonCalls,
    NamedJson,
    Schemas,
    TaggedParameters,
    read_gemma,
    read_llama,
    read_mistral,
)
from actors.policy.literals import raw_value
from actors.policy.reading import Found


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way of writing tool calls."""

    openings: tuple[str, ...]
    read: Callable[[str, int, Schemas], Found]
    marks: tuple[str, ...] = ()
    """Further texts with a meaning; like openings, they may be special tokens."""
    ends: tuple[str, ...] = ()
    """Texts with a meaning that end answers, too."""
    bare: tuple[str, ...] = ()
    """Texts by which an answer begins that may be a call without an opening."""
    framed: bool = False
    """An answer consists of messages with a header each, which says to whom it is."""


FUNCTION = re.compile(r"(?:<(?:seed:)?tool_call>\s*)?<function=(?P<name>[^>\s]+)>\s*")
QWEN3_CODER = {
    "head": FUNCTION,
    "parameter": re.compile(r"<parameter=(?P<key>[^>\s]+)>\n?"),
    "value_end": re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)"),
}
IN_TAGS = TaggedParameters(
    "<tool_call>",
    **QWEN3_CODER,
    tail=re.compile(r"</function>\s*(?:</(?:seed:)?tool_call>|\Z)"),
    closing="</tool_call>",
)
ALONE = TaggedParameters("<function=", **QWEN3_CODER, tail=re.compile("</function>"), closing="</function>")


def read_qwen3_coder(text: str, at: int, schemas: Schemas) -> Found:
    """Read <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""
    return (ALONE if text.startswith("<function=", at) else IN_TAGS)(text, at, schemas)


GLM45 = TaggedParameters(
    "<tool_call>",
    head=re.compile(r"<tool_call>\s*(?P<name>[^\n<{]+?)\s*(?=<arg_key>|</tool_call>)"),
    parameter=re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>"),
    value_end=re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)"),
    tail=re.compile("</tool_call>"),
    closing="</tool_call>",
)
INVOKE_AROUND = "minimax:tool_call", "atem:function_calls", "｜DSML｜function_calls"  # noqa: RUF001 - DeepSeek's
INVOKES = "<invoke name=", "<atem:invoke name=", "<｜DSML｜invoke name="  # noqa: RUF001 - DeepSeek's bars
PREFIX, AROUND = "(?:atem:|｜DSML｜)?", "|".join(INVOKE_AROUND)  # noqa: RUF001 - DeepSeek's bars
INVOKE = TaggedParameters(
    "<invoke",
    head=re.compile(rf'(?:<(?:{AROUND})>\s*)?<{PREFIX}invoke name="(?P<name>[^"]+)">\s*'),
    parameter=re.compile(rf'<{PREFIX}parameter name="(?P<key>[^"]+)"(?: string="(?P<text>true|false)")?>'),
    value_end=re.compile(rf"</{PREFIX}parameter>\s*(?=<{PREFIX}parameter name=|</{PREFIX}invoke>)"),
    tail=re.compile(rf"</{PREFIX}invoke>\s*(?:</(?:{AROUND})>)?"),
    closing="</invoke>",
)
DEEPSEEK_BEGIN, DEEPSEEK_CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"  # noqa: RUF001 - DeepSeek's
DEEPSEEK_SEP, DEEPSEEK_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001 - DeepSeek's bars
DEEPSEEK_ENDS = "<｜tool▁calls▁end｜>"  # noqa: RUF001 - DeepSeek's bars
DEEPSEEK = NamedJson(
    DEEPSEEK_CALL,
    re.compile(
        rf"(?:{DEEPSEEK_BEGIN})?\s*{DEEPSEEK_CALL}(?:\w+{DEEPSEEK_SEP}(?=[^{{\n]+\n))?"
        rf"(?P<name>[^<{{\n]+?)\s*(?:{DEEPSEEK_SEP})?\s*(?:```json)?\s*(?=\{{)"
    ),
    re.compile(rf"\s*(?:```)?\s*(?:{DEEPSEEK_END}|\Z)\s*(?:{DEEPSEEK_ENDS})?"),
    DEEPSEEK_END,
)
KIMI = NamedJson(
    "<|tool_call_begin|>",
    re.compile(
        r"(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?"
        r"(?P<name>[^<{\s]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    re.compile(r"\s*(?:<\|tool_call_end\|>|\Z)\s*(?:<\|tool_calls_section_end\|>)?"),
    "<|tool_call_end|>",
)


def read_message(text: str, at: int, schemas: Schemas) -> Found:
    """Read the body of a message to a tool that is no JSON, as Muse writes it."""
    return INVOKE(text, at, schemas)


def in_marks(opening: str, closing: str) -> CallFormat:
    return CallFormat((opening,), JsonCalls(opening, closing), (closing,))


CALL_FORMATS: Mapping[str, CallFormat] = {
    "harmony": CallFormat(
        ("<|message|>",), read_message, ("<|start|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|eom|>"),
        ends=("<|call|>", "<|return|>", "<|eot|>"), framed=True,
    ),
    "gemma4": CallFormat(("<|tool_call>",), read_gemma, ("<tool_call|>", '<|"|>')),
    "deepseek": CallFormat(
        (DEEPSEEK_BEGIN, DEEPSEEK_CALL), DEEPSEEK, (DEEPSEEK_SEP, DEEPSEEK_END, DEEPSEEK_ENDS)
    ),
    "kimi": CallFormat(
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"), KIMI,
        ("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    "invoke": CallFormat(
        (*(f"<{around}>" for around in INVOKE_AROUND), *INVOKES), INVOKE,
        tuple(f"</{around}>" for around in INVOKE_AROUND),
    ),
    "lfm2_plain": CallFormat(
        ("<|tool_call_start|>",), FunctionCalls("<|tool_call_start|>", "<|tool_call_end|>", raw_value),
        ("<|tool_call_end|>",),
    ),
    "lfm2": CallFormat(
        ("<|tool_call_start|>",), FunctionCalls("<|tool_call_start|>", "<|tool_call_end|>"),
        ("<|tool_call_end|>",),
    ),
    "olmo3": CallFormat(
        ("<function_calls>",), FunctionCalls("<function_calls>", "</function_calls>"), ("</function_calls>",)
    ),
    "command": in_marks("<|START_ACTION|>", "<|END_ACTION|>"),
    "jamba": in_marks("<tool_calls>", "</tool_calls>"),
    "nemotron": in_marks("<TOOLCALL>", "</TOOLCALL>"),
    "phi4": CallFormat(
        ("<|tool_call|>",), JsonCalls("<|tool_call|>", "<|/tool_call|>", must_close=False),
        ("<|/tool_call|>",),
    ),
    "qwen3_coder": CallFormat(
        ("<tool_call>", "<seed:tool_call>", "<function="), read_qwen3_coder,
        ("</tool_call>", "</seed:tool_call>", "</function>"),
    ),
    "glm45": CallFormat(
        ("<tool_call>",), GLM45, ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    ),
    "hermes": in_marks("<tool_call>", "</tool_call>"),
    "mistral": CallFormat(("[TOOL_CALLS]",), read_mistral, ("[ARGS]", "[CALL_ID]")),
    "llama3": CallFormat(
        ("<|python_tag|>", "<|python_start|>"), read_llama, ("<|python_end|>",), bare=("{", "[")
    ),
}  # fmt: skip
"""Formats by name, those first whose marks no other has."""
SIGNS = {
    "<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    "<tool_call>": "hermes",
    "<|tool_list_start|>": "lfm2",
    **{sign: name for name, one in CALL_FORMATS.items() if not one.framed for sign in one.openings},
    '"parameters"': "llama3",
}
"""Texts of chat templates that write no calls, and the format of their models, the surest first."""


def format_shown(template: str) -> str:
    """Return the format that the text of a chat template names; "hermes" where it names none."""
    return next((name for sign, name in SIGNS.items() if sign in template), "hermes")
