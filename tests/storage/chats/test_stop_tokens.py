"""Which tokens end an answer: by the files of a model, by its tokenizer and by its chat template."""

import json

import pytest

from bus.errors import ConfigError
from storage.chats.stop_tokens import answer_end, answer_start, stop_tokens, turn_ends
from tests.published_chats import CHATS, tokenizer_of, tokenizer_of_chat

QWEN = tokenizer_of_chat(CHATS["Qwen3"])
SIZE = len(QWEN)


def number(tokenizer, text: str) -> int:
    return tokenizer.convert_tokens_to_ids(text)


def named(model, tokenizer) -> dict[str, tuple[str, ...]]:
    return {token.text: token.named_by for token in stop_tokens(model, tokenizer)}


@pytest.mark.parametrize("family", CHATS)
def test_the_template_shows_by_which_tokens_answers_end(family):
    chat = CHATS[family]
    tokenizer = tokenizer_of_chat(chat)
    assert {tokenizer.decode([found]) for found in turn_ends(tokenizer).all} == chat.ends


def test_all_that_names_an_end_is_heard(tmp_path):
    end, text = number(QWEN, "<|im_end|>"), number(QWEN, "<|endoftext|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, text]}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": end}}))
    assert named(tmp_path, QWEN) == {
        "<|im_end|>": ("generation_config.json", "config.json", "chat template"),
        "<|endoftext|>": ("generation_config.json", "tokenizer"),
    }


def test_gpt_oss_ends_with_return_and_call_and_not_with_the_end_of_its_analysis(tmp_path):
    tokenizer = tokenizer_of_chat(CHATS["gpt-oss"])
    returned, called = number(tokenizer, "<|return|>"), number(tokenizer, "<|call|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [returned, called]}))
    assert set(named(tmp_path, tokenizer)) == {"<|return|>", "<|call|>"}
    ends = turn_ends(tokenizer)
    assert (ends.last, ends.history) == (returned, number(tokenizer, "<|end|>"))


def test_a_template_may_end_answers_otherwise_than_the_tokenizer_says(tmp_path):
    """Phi-3.5 ends turns with <|end|>, and its tokenizer names <|endoftext|>, which comes last."""
    phi = tokenizer_of(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        ("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), "<|endoftext|>",
    )  # fmt: skip
    assert named(tmp_path, phi) == {"<|end|>": ("chat template",), "<|endoftext|>": ("tokenizer",)}
    assert answer_end(phi) == number(phi, "<|end|>")


def test_an_answer_starts_with_what_the_template_writes_before_its_text():
    assert answer_start(tokenizer_of_chat(CHATS["gpt-oss"])) == "<|channel|>final<|message|>"
    assert answer_start(tokenizer_of_chat(CHATS["Qwen3"])) == ""
    thinking = tokenizer_of(
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>",
    )  # fmt: skip
    assert answer_start(thinking) == "<think>\n\n</think>\n\n"
    otherwise = tokenizer_of(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
        ("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>",
    )  # fmt: skip
    assert answer_start(otherwise) == ""


def test_a_demonstration_ends_as_the_template_ends_answers_and_else_as_the_tokenizer_says():
    assert answer_end(QWEN) == number(QWEN, "<|im_end|>")
    glm = tokenizer_of_chat(CHATS["GLM-4.5"])
    assert answer_end(glm) == number(glm, "<|user|>"), "its answers end where the next turn begins"
    plain = tokenizer_of(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ("</s>",), "</s>"
    )
    assert answer_end(plain) == number(plain, "</s>")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_ends_no_answer_names_no_token(template, tmp_path):
    assert named(tmp_path, tokenizer_of(template, ("</s>",), "</s>")) == {"</s>": ("tokenizer",)}


def test_a_model_without_any_end_is_refused_with_what_to_do(tmp_path):
    silent = tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}", ("<|a|>",), "<|a|>")
    silent.eos_token = None
    with pytest.raises(ConfigError, match=r"nothing names a token .* add eos_token_id to generation_config"):
        stop_tokens(tmp_path, silent)
    with pytest.raises(ConfigError, match="add eos_token to tokenizer_config"):
        answer_end(silent)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f'{{"eos_token_id": [7, {SIZE}]}}', rf"{SIZE}, which is no token of a vocabulary of {SIZE}"),
        ('{"eos_token_id": -1}', "-1, which is no token"),
        ('{"eos_token_id": true}', "True, which is no token"),
        ('{"eos_token_id": "<|im_end|>"}', "which is no token"),
        ('{"eos_token_id": [[2]]}', "which is no token"),
        ('{"eos_token_id": 2', "cannot be read"),
        ("[2]", "list and no JSON object"),
    ],
)
def test_a_file_that_names_what_is_no_token_is_refused_by_name(content, said, tmp_path):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"generation_config.json.*{said}"):
        stop_tokens(tmp_path, QWEN)


def test_rows_of_a_head_beyond_the_tokenizer_are_tokens_too(tmp_path):
    """A model's vocabulary may be longer than its tokenizer's."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": SIZE + 8}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": SIZE + 7}))
    assert SIZE + 7 in {token.number for token in stop_tokens(tmp_path, QWEN)}
