"""Chats with tools of a scripted model."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.engines.base import Sampling
from actors.environments.build import build_environment
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.settings.tool_chat import ToolsConfig
from benchmarks.scripted_engine import ScriptedEngine

LONG = Sampling(max_new_tokens=100)
SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", "<|unk|>")
TEMPLATE = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments }}}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tool_tokenizer():
    """One token a character, and a chat template that knows tools."""
    vocabulary = {token: n for n, token in enumerate((*SPECIALS, *string.printable))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|end|>", unk_token="<|unk|>",
        additional_special_tokens=list(SPECIALS[1:5]), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Model:
    """Answers each chat, by how many times it was asked; keeps the chats that it saw."""

    def __init__(self, tokenizer, *answers):
        self._tokenizer = tokenizer
        self.answers = answers
        self.saw = []

    def __call__(self, token_ids):
        self.saw.append(self._tokenizer.decode(list(token_ids)))
        return self._tokenizer.encode(self.answers[(len(self.saw) - 1) % len(self.answers)])


def environment_of(*tools, **settings):
    return build_environment(
        ToolsConfig.model_validate(
            {"type": "tools", "calls": "tags", "tools": tools or [{"type": "calculator"}], **settings}
        )
    )


async def rolled_out(environment, tokenizer, *answers, label="42", sampling=LONG, task=None):
    model = Model(tokenizer, *answers)
    policy = Policy(ScriptedEngine(model), tokenizer, sampling)
    episode = await environment.run(task or Task(task_id="t", prompt="6*7", label=label), policy)
    return episode, model
