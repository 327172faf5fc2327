"""Small chat templates of our own with the grammars of published families, and tokenizers for them.

Each writes turns, tools, reasoning and calls as its family does, and leaves out what tests do not need."""

# ruff: noqa: RUF001, E501 - templates are whole lines, and the tokens of DeepSeek have bars of their own
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Chat:
    """A family's way of writing chats."""

    template: str
    specials: tuple[str, ...]
    eos: str
    ends: frozenset[str]
    """Tokens by which its answers end, by its template alone."""
    calls: str
    """Format of its tool calls, as actors.tool_calls names it."""
    most_calls: int = 2
    """Most calls that it writes in one answer."""
    raw_text: bool = False
    """Texts in arguments are written without escapes."""


TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def loop(user: str, answer: str, result: str, begin: str) -> str:
    """Return a template of the turns of users, of the assistant and of tools, and of where it begins."""
    return (
        TOOLS + "{% for m in messages %}"
        "{% if m.role == 'user' or m.role == 'system' %}" + user + "{% elif m.role == 'assistant' %}" + answer
        + "{% else %}" + result + "{% endif %}{% endfor %}{% if add_generation_prompt %}" + begin + "{% endif %}"
    )  # fmt: skip


def each(written: str, before: str = "", after: str = "", between: str = "") -> str:
    """Return what writes the calls of a message; in `written`, `f` is a call's function."""
    divided = "{{ '" + between + "' if not loop.last }}" if between else ""
    return (
        "{% if m.tool_calls %}" + before + "{% for c in m.tool_calls %}{% set f = c.function %}" + written
        + divided + "{% endfor %}" + after + "{% endif %}"
    )  # fmt: skip


ARGS = "{{ f.arguments | tojson }}"
HERMES = each('\n<tool_call>\n{"name": "{{ f.name }}", "arguments": ' + ARGS + "}\n</tool_call>")
VALUE = "{{ v if v is string else v | tojson }}"
CODER = each(
    "\n<tool_call>\n<function={{ f.name }}>{% for k, v in f.arguments | items %}\n<parameter={{ k }}>\n"
    + VALUE
    + "\n</parameter>{% endfor %}\n</function>\n</tool_call>"
)
GLM = each(
    "\n<tool_call>{{ f.name }}{% for k, v in f.arguments | items %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>"
    + VALUE
    + "</arg_value>{% endfor %}\n</tool_call>"
)


def invoke(prefix: str, before: str, after: str) -> str:
    """Return what writes calls as <invoke name="..."><parameter name="...">."""
    return each(
        f'\n<{prefix}invoke name="{{{{ f.name }}}}">{{% for k, v in f.arguments | items %}}'
        f'\n<{prefix}parameter name="{{{{ k }}}}">{VALUE}</{prefix}parameter>{{% endfor %}}\n</{prefix}invoke>',
        before,
        after,
    )


GEMMA_VALUE = """{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>
{%- elif v is boolean %}{{ 'true' if v else 'false' }}{% elif v is none %}null
{%- elif v is mapping %}{{ '{' }}{% for k, one in v | items %}<|"|>{{ k }}<|"|>:{{ value(one) }}
{%- if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% elif v is iterable %}[
{%- for one in v %}{{ value(one) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}
{%- endmacro %}"""
PYTHON_VALUE = """{% macro value(v) %}{% if v is string %}'{{ v | replace('\\\\', '\\\\\\\\')
| replace("'", "\\\\'") | replace('\\n', '\\\\n') }}'{% elif v is mapping or v is boolean or v is none %}
{{- v | string if v is not mapping else v | tojson }}{% else %}{{ v }}{% endif %}{% endmacro %}"""
PYTHON_CALL = (
    "{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}={{ value(v) }}{{ ', ' if not loop.last }}"
    "{% endfor %})"
)
IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def im(calls: str, think: str = "") -> str:
    """Return a template in ChatML."""
    return loop(
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
        "<|im_start|>assistant\n" + think + "{{ m.content }}" + calls + "<|im_end|>\n",
        "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n",
        "<|im_start|>assistant\n",
    )


def ended(begin: str, end: str, calls: str, names: str = "system user assistant tool") -> str:
    """Return a template whose turns have a beginning with the role's name and an end."""
    system, user, assistant, tool = names.split()
    turn = {name: begin.replace("ROLE", name) for name in (system, user, assistant, tool)}
    return loop(
        turn[user] + "{{ m.content }}" + end,
        turn[assistant] + "{{ m.content or '' }}" + calls + end,
        turn[tool] + "{{ m.content }}" + end,
        turn[assistant],
    )


THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
GPT_OSS = (
    TOOLS
    + """{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}
{%- set f = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json
{{- '<|message|>' }}{{ f.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}
{%- elif m.role == 'tool' %}<|start|>functions.probe to=assistant<|channel|>commentary<|message|>
{{- m.content | tojson }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
)
DEEPSEEK_TOKENS = (
    "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
DEEPSEEK_END = frozenset(("<｜end▁of▁sentence｜>",))


def deepseek(written: str) -> str:
    """Return a template that writes content or calls, and takes arguments as text alone."""
    calls = each(written, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    return loop(
        "<｜User｜>{{ m.content }}",
        "<｜Assistant｜>{% if m.tool_calls %}" + calls + "{% else %}{{ m.content }}{% endif %}"
        "<｜end▁of▁sentence｜>",
        "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
        "<｜Assistant｜>",
    )


LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                 "<|python_tag|>", "<|end_of_text|>")  # fmt: skip
LLAMA4_TOKENS = ("<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>",
                 "<|end_of_text|>")  # fmt: skip
GEMMA4_CALL = (
    "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | items %}{{ k }}:{{ value(v) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>"
)
JSON_CALL = '{"name": "{{ f.name }}", "arguments": ' + ARGS + "}"
COMMAND_CALL = (
    '\n{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": ' + ARGS + "}"
)


def chat(
    template: str, specials: tuple[str, ...], calls: str, ends: str, *, eos: str = "", **other: object
) -> Chat:
    """Return a family whose ends are the words of `ends`."""
    return Chat(template, specials, eos or specials[-1], frozenset(ends.split()), calls, **other)  # type: ignore[arg-type]


CHATS: dict[str, Chat] = {
    "Qwen3": chat(im(HERMES, THINK), IM, "hermes", "<|im_end|>"),
    "Qwen3.5": chat(im(CODER, THINK), IM, "qwen3_coder", "<|im_end|>", raw_text=True),
    "GLM-4.5": chat(
        loop(
            "<|user|>\n{{ m.content }}",
            "<|assistant|>\n" + THINK + "{{ m.content }}" + GLM,
            "<|observation|>\n{{ m.content }}",
            "<|assistant|>\n",
        ),
        ("<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        "glm45",
        "<|user|> <|observation|>",
        raw_text=True,
    ),
    "gpt-oss": chat(
        GPT_OSS,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
        "harmony",
        "<|return|> <|call|>",
        most_calls=1,
    ),
    "DeepSeek-V3": chat(
        deepseek(
            "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ '' + f.arguments }}"
            "\n```<｜tool▁call▁end｜>"
        ),
        DEEPSEEK_TOKENS,
        "deepseek",
        "<｜end▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
    "DeepSeek-V3.1": chat(
        deepseek("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ '' + f.arguments }}<｜tool▁call▁end｜>"),
        DEEPSEEK_TOKENS,
        "deepseek",
        "<｜end▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
    "DeepSeek-V3.2": chat(
        ended(
            "<｜ROLE｜>",
            "<｜end▁of▁sentence｜>",
            each(
                '\n<｜DSML｜invoke name="{{ f.name }}">{% for k, v in f.arguments | items %}'
                '\n<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
                + VALUE
                + "</｜DSML｜parameter>{% endfor %}\n</｜DSML｜invoke>",
                "<｜DSML｜function_calls>",
                "\n</｜DSML｜function_calls>",
            ),
            "System User Assistant tool",
        ),
        ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        "invoke",
        "<｜end▁of▁sentence｜>",
        raw_text=True,
    ),
    "Gemma 4": chat(
        GEMMA_VALUE
        + loop(
            "<|turn>user\n{{ m.content }}<turn|>\n",
            "<|turn>model\n{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>"
            "{% endif %}" + each(GEMMA4_CALL) + "{{ m.content }}{{ '<|tool_response>' if m.tool_calls and "
            "loop.last else '<turn|>\n' }}",
            "<|tool_response>{{ m.content }}<tool_response|>",
            "<|turn>model\n",
        ),
        (
            "<|turn>",
            "<turn|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            '<|"|>',
            "<|channel>",
            "<channel|>",
            "<eos>",
        ),
        "gemma4",
        "<turn|> <|tool_response>",
        raw_text=True,
    ),
    "LFM2": chat(
        PYTHON_VALUE + im(each(PYTHON_CALL, "<|tool_call_start|>[", "]<|tool_call_end|>", ", ")),
        ("<|tool_call_start|>", "<|tool_call_end|>", *IM),
        "lfm2",
        "<|im_end|>",
    ),
    "Command": chat(
        ended(
            "<|START_OF_TURN_TOKEN|><|ROLE|>",
            "<|END_OF_TURN_TOKEN|>",
            each(COMMAND_CALL, "<|START_ACTION|>[", "\n]<|END_ACTION|>", ","),
        ),
        (
            "<|START_OF_TURN_TOKEN|>",
            "<|user|>",
            "<|assistant|>",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|END_OF_TURN_TOKEN|>",
        ),
        "command",
        "<|END_OF_TURN_TOKEN|>",
    ),
    "Jamba": chat(
        ended(
            "<|bom|><|ROLE|> ",
            "<|eom|>",
            each("\n    " + JSON_CALL, "<tool_calls>[", "\n]</tool_calls>", ","),
        ),
        ("<|bom|>", "<|eom|>", "<tool_calls>", "</tool_calls>", "<|endoftext|>"),
        "jamba",
        "<|eom|>",
    ),
    "MiniMax-M1": chat(
        ended(
            "<beginning_of_sentence>ROLE\n",
            "<end_of_sentence>\n",
            each(JSON_CALL + "\n", "\n<tool_calls>\n", "</tool_calls>"),
        ),
        ("<beginning_of_sentence>", "<end_of_sentence>"),
        "jamba",
        "<end_of_sentence>",
    ),
    "MiniMax-M2": chat(
        ended(
            "]~b]ROLE\n",
            "[e~[\n",
            invoke("", "\n<minimax:tool_call>", "\n</minimax:tool_call>"),
            "system user ai tool",
        ),
        ("]~b]", "[e~["),
        "invoke",
        "[e~[",
        raw_text=True,
    ),
    "Muse": chat(
        loop(
            "<|start|>user<|message|>{{ m.content }}<|eot|>",
            "{% if m.reasoning_content %}<|start|>assistant to=self<|message|>{{ m.reasoning_content }}<|eom|>"
            "{% endif %}{% if not m.tool_calls %}<|start|>assistant to=user<|message|>{{ m.content }}<|eot|>"
            "{% endif %}"
            + invoke(
                "atem:",
                "<|start|>assistant to=probe<|message|><atem:function_calls>",
                "\n</atem:function_calls><|eot|>",
            ),
            "<|start|>tool probe<|message|>{{ m.content }}<|eot|>",
            "<|start|>assistant",
        ),
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        "harmony",
        "<|eot|>",
        raw_text=True,
    ),
    "Llama 3.1": chat(
        "<|begin_of_text|>"
        + ended(
            "<|start_header_id|>ROLE<|end_header_id|>\n\n",
            "<|eot_id|>",
            "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('only one call') }}{% endif %}"
            + each('{"name": "{{ f.name }}", "parameters": ' + ARGS + "}"),
            "system user assistant ipython",
        ),
        LLAMA3_TOKENS,
        "llama3",
        "<|eot_id|>",
        most_calls=1,
    ),
    "Llama 4": chat(
        ended(
            "<|header_start|>ROLE<|header_end|>\n\n",
            "<|eot|>",
            each('{"name": "{{ f.name }}", "parameters": ' + ARGS + "}", "<|python_start|><|python_end|>"),
            "system user assistant ipython",
        ),
        LLAMA4_TOKENS,
        "llama3",
        "<|eot|>",
    ),
    "Llama in Python": chat(
        PYTHON_VALUE
        + ended("<|header_start|>ROLE<|header_end|>\n\n", "<|eot|>", each(PYTHON_CALL, "[", "]", ", ")),
        LLAMA4_TOKENS,
        "llama3",
        "<|eot|>",
    ),
    "OLMo 3": chat(
        PYTHON_VALUE + im(each(PYTHON_CALL, "<function_calls>", "</function_calls>", "\\n")),
        IM,
        "olmo3",
        "<|im_end|>",
    ),
    "Kimi K2": chat(
        ended(
            "<|im_ROLE|>ROLE<|im_middle|>",
            "<|im_end|>",
            each(
                "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>" + ARGS + "<|tool_call_end|>",
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
            ),
        ),
        (
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_middle|>",
            "<|im_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "[EOS]",
        ),
        "kimi",
        "<|im_end|>",
    ),
    "Mistral 7B v0.3": chat(
        loop(
            "[INST] {{ m.content }}[/INST]",
            " {{ m.content }}"
            + each(
                '{"name": "{{ f.name }}", "arguments": ' + ARGS + ', "id": "{{ c.id }}"}',
                "[TOOL_CALLS] [",
                "]",
                ", ",
            )
            + "</s>",
            '[TOOL_RESULTS] {"content": {{ m.content | tojson }}}[/TOOL_RESULTS]',
            "",
        ),
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        "mistral",
        "</s>",
    ),
    "Mistral Small 3.2": chat(
        loop(
            "[INST]{{ m.content }}[/INST]",
            "{{ m.content }}" + each("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]" + ARGS) + "</s>",
            "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
            "",
        ),
        (
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[CALL_ID]",
            "[ARGS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "</s>",
        ),
        "mistral",
        "</s>",
    ),
    "Nemotron 3": chat(
        im(CODER, "<think>" + "{{ m.reasoning_content or '' }}</think>"),
        IM,
        "qwen3_coder",
        "<|im_end|>",
        raw_text=True,
    ),
    "Nemotron Nano 2": chat(
        ended("<SPECIAL_10>ROLE\n", "<SPECIAL_12>\n", each(JSON_CALL, "<TOOLCALL>[", "]</TOOLCALL>", ", ")),
        ("<SPECIAL_10>", "<SPECIAL_12>", "</s>"),
        "nemotron",
        "<SPECIAL_12>",
    ),
    "EXAONE 4": chat(
        ended("[|ROLE|]", "[|endofturn|]\n", HERMES),
        ("[|user|]", "[|assistant|]", "[|endofturn|]"),
        "hermes",
        "[|endofturn|]",
    ),
    "Phi-4-mini": chat(
        ended("<|ROLE|>", "<|end|>", each(JSON_CALL, "<|tool_call|>[", "]<|/tool_call|>", ", ")),
        ("<|user|>", "<|assistant|>", "<|tool_call|>", "<|/tool_call|>", "<|end|>", "<|endoftext|>"),
        "phi4",
        "<|end|>",
    ),
    "Seed-OSS": chat(
        ended("<seed:bos>ROLE\n", "<seed:eos>", CODER.replace("tool_call>", "seed:tool_call>")),
        ("<seed:bos>", "<seed:eos>"),
        "qwen3_coder",
        "<seed:eos>",
        raw_text=True,
    ),
    "Granite 3": chat(
        ended(
            "<|start_of_role|>ROLE<|end_of_role|>",
            "<|end_of_text|>\n",
            each(JSON_CALL, "<|tool_call|>[", "]", ", "),
        ),
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|end_of_text|>"),
        "phi4",
        "<|end_of_text|>",
    ),
}
"""Families by name."""


def tokenizer_of(template: str, specials: tuple[str, ...], eos: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes and these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({piece: number for number, piece in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_of_chat(chat: Chat) -> PreTrainedTokenizerFast:
    """Return a family's tokenizer."""
    return tokenizer_of(chat.template, chat.specials, chat.eos)
