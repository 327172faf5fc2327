"""Chat templates in the manner of families of models, small real tokenizers, and what follows an answer.

`Family.tail` is written by hand, apart from the templates: the text that belongs between two answers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN3 = """
{%- macro calls(message) %}{% for call in message.tool_calls or [] %}
{%- set call = call.function %}{{ '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{% endmacro %}
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not (loop.first and tools)) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if THINK and loop.index0 > ns.last and (loop.last or message.reasoning_content) %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content.split('</think>')[-1] }}{{ calls(message) }}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CODER_CALLS = """
{%- macro calls(message) %}{% for call in message.tool_calls or [] %}
{%- set call = call.function %}{{ '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for name, value in call.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}{{ value if value is string else value | tojson }}
{{- '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}{% endmacro %}"""

LLAMA3 = """{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only one tool call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- elif message.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{ message.content | tojson }}{{ '<|eot_id|>' }}
{%- elif message.role == 'user' and tools and loop.first %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- message.content | trim + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
{#- <|python_tag|> #}"""

MISTRAL = """
{%- set ns = namespace(turns=0, last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('roles must alternate') }}
{%- endif %}
{%- set ns.turns = ns.turns + 1 %}{% endif %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('tool call ids have 9 characters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']</s>' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + '</s>' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}"""

NO_END = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>\\n' + message.content.split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}</tool_call>' }}{% endfor %}
{%- elif message.role == 'tool' %}{{ '<|observation|>\\n' + message.content }}
{%- else %}{{ '<|' + message.role + '|>\\n' + message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

SPECIALS = (
    "<|pad|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|python_tag|>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>",
)  # fmt: skip
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special, as in Qwen3's tokenizer."""


def tokenizer_of(template: str, end: str) -> PreTrainedTokenizerFast:
    """Bytes, and a few merges: most texts can be tokenised in several ways."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("Ċ", "Ċ"), ("Ġ", "a"), ("e", "r")]
    vocabulary = {piece: n for n, piece in enumerate([*alphabet, *(x + y for x, y in merges)])}
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token="<|pad|>")
    tokenizer.chat_template = template
    return tokenizer


def im_tail(new: Sequence[dict]) -> str:
    text, grouped = "\n", False
    for message, following in zip(new, [*new[1:], {"role": ""}], strict=True):
        if message["role"] != "tool":
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            continue
        text += "" if grouped else "<|im_start|>user"
        text += f"\n<tool_response>\n{message['content']}\n</tool_response>"
        grouped = following["role"] == "tool"
        text += "" if grouped else "<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def llama3_tail(new: Sequence[dict]) -> str:
    def written(message: dict) -> str:
        tool = message["role"] == "tool"
        content = json.dumps(message["content"], ensure_ascii=False) if tool else message["content"].strip()
        role = "ipython" if tool else message["role"]
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"

    return "".join(map(written, new)) + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def mistral_tail(new: Sequence[dict]) -> str:
    def written(message: dict) -> str:
        if message["role"] == "user":
            tools = f"[AVAILABLE_TOOLS] {json.dumps(TOOLS)}[/AVAILABLE_TOOLS]"
            return f"{tools}[INST] {message['content']}[/INST]"
        content = json.dumps(message["content"], ensure_ascii=False)
        return (
            f'[TOOL_RESULTS] {{"content": {content}, "call_id": "{message["tool_call_id"]}"}}[/TOOL_RESULTS]'
        )

    return "".join(map(written, new))


def no_end_tail(new: Sequence[dict]) -> str:
    names = {"tool": "observation"}
    texts = (f"<|{names.get(m['role'], m['role'])}|>\n{m['content']}" for m in new)
    return "".join(texts) + "<|assistant|>\n"


def json_call(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def coder_call(name: str, arguments: dict) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


@dataclass(frozen=True)
class Family:
    """How one family of models speaks."""

    tokenizer: PreTrainedTokenizerFast
    end: str
    """The token by which an answer ends."""
    closing: str
    """What the template writes at the end of an answer before `tail`."""
    tail: Callable[[Sequence[dict]], str]
    """Text behind the end of an answer, up to where the next one begins."""
    write_calls: Callable[[Sequence[tuple[str, dict]]], str]
    """Writes calls of tools as the model does."""
    several_calls: bool = True


def family(template: str, end: str, tail, write_calls, *, closing: str | None = None, **more) -> Family:
    closed = end if closing is None else closing
    return Family(tokenizer_of(template, end), end, closed, tail, write_calls, **more)


def _lines(write) -> Callable[[Sequence[tuple[str, dict]]], str]:
    return lambda calls: "\n".join(write(*call) for call in calls)


FAMILIES = {
    "qwen3": family(QWEN3.replace("THINK", "true"), "<|im_end|>", im_tail, _lines(json_call)),
    "hermes": family(QWEN3.replace("THINK", "false"), "<|im_end|>", im_tail, _lines(json_call)),
    "qwen3_coder": family(
        CODER_CALLS + QWEN3.replace("THINK", "false").partition("{% endmacro %}")[2],
        "<|im_end|>", im_tail, _lines(coder_call),
    ),
    "llama3": family(
        LLAMA3, "<|eot_id|>", llama3_tail,
        lambda calls: "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls),
        several_calls=False,
    ),
    "mistral": family(
        MISTRAL, "</s>", mistral_tail,
        lambda calls: "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in calls]),
    ),
    "no_end": family(NO_END, "<|user|>", no_end_tail, _lines(json_call), closing=""),
}  # fmt: skip
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Numbers", "parameters": NUMBERS}}
    for name in ("add", "sub")
]
