"""What a start says of a model's chats."""

import json
from pathlib import Path

import pytest

from bus.errors import ConfigError
from launch.checks.model_remarks import chat_remark
from launch.settings.run_config import resolve
from tests.published_chats import CHATS, tokenizer_of_chat


def model(path: Path, family: str, **generation: object) -> Path:
    tokenizer_of_chat(CHATS[family]).save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_a_start_says_which_tokens_end_answers_and_what_names_them(tmp_path):
    config = resolve({"model": {"path": model(tmp_path, "Qwen3")}})
    assert chat_remark(config) == (
        "Answers end with <|im_end|> (257: chat template), <|endoftext|> (258: tokenizer)."
    )


def test_a_start_refuses_a_file_that_names_what_is_no_token(tmp_path):
    config = resolve({"model": {"path": model(tmp_path, "Qwen3", eos_token_id=[9999])}})
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id=\[9999\]"):
        chat_remark(config)


def test_nothing_is_said_of_a_model_that_is_not_here():
    assert chat_remark(resolve({"model": {"path": "nowhere"}})) == ""
    assert chat_remark(resolve({})) == ""


def test_a_start_says_how_calls_are_read_and_refuses_a_template_whose_calls_nothing_reads(tmp_path):
    tools = {"environment": {"type": "tools", "reward": "exact", "tools": [{"type": "calculator"}]}}
    layer = {"model": {"path": model(tmp_path, "Qwen3")}, "actors": tools}
    assert chat_remark(resolve(layer)).endswith("tokenizer). Their tool calls are read as hermes.")
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().replace("tool_call>", "other>"))
    with pytest.raises(ConfigError, match=r"actors.tool_calls=auto: .* no format reads: '<other>"):
        chat_remark(resolve(layer))
    tagged = {**tools["environment"], "calls": "tags"}
    assert "calls" not in chat_remark(resolve({**layer, "actors": {"environment": tagged}}))
