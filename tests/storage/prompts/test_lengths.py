"""Prompts against a model's context, with a real tokenizer and a real configuration."""

import sys
from pathlib import Path

import pytest
from transformers import AddedToken, Qwen3Config

from bus.errors import ConfigError
from bus.messages import Prompt
from learner.initial.scratch_model import character_tokenizer
from storage.prompt_files.stored_prompts import store_prompts
from storage.prompts import length_check as lengths
from storage.prompts.length_check import check_prompt_lengths, long_prompts, once


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without weights: a token a character, two for the chat, 32 in the context."""
    directory = tmp_path_factory.mktemp("model")
    character_tokenizer().save_pretrained(directory)
    Qwen3Config(max_position_embeddings=32).save_pretrained(directory)
    return directory


def test_prompts_that_fill_the_context_exactly_pass(model):
    check_prompt_lengths([Prompt(content="x" * 20)], model, max_new_tokens=10)


def test_prompt_that_is_too_long_is_named_with_its_length(model):
    prompts = [Prompt(content="short"), Prompt(content="y" * 21)]
    with pytest.raises(
        ConfigError, match=r"prompt 2 has 23 tokens: with 10 new ones .* context of 32 .*yyyy"
    ):
        check_prompt_lengths(prompts, model, max_new_tokens=10)


def test_all_prompts_that_are_too_long_are_found(model):
    prompts = [Prompt(content="y" * 21), Prompt(content="short"), Prompt(content="z" * 30)]
    found = list(long_prompts(prompts, model, max_new_tokens=10))
    assert [one.index for one in found] == [0, 2]
    assert "prompt 3 has 32 tokens" in found[1].problem


def test_chat_is_measured_with_all_its_messages(model):
    chat = [{"role": "user", "content": "z" * 10}, {"role": "assistant", "content": "z" * 10}]
    check_prompt_lengths([Prompt(content=[*chat])], model, max_new_tokens=8)
    with pytest.raises(ConfigError, match="prompt 1 has 24 tokens"):
        check_prompt_lengths([Prompt(content=[*chat])], model, max_new_tokens=9)


def test_a_prompt_with_a_token_that_the_model_does_not_embed_is_named(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(AddedToken("<image_soft_token>", special=True))
    tokenizer.save_pretrained(tmp_path)
    Qwen3Config(max_position_embeddings=32, vocab_size=len(tokenizer) - 1).save_pretrained(tmp_path)
    check_prompt_lengths([Prompt(content="image")], tmp_path, max_new_tokens=10)
    prompts = [Prompt(content="x"), Prompt(content="<image_soft_token>")]
    with pytest.raises(ConfigError, match=r"prompt 2: it has '<image_soft_token>', .* embeds 58 tokens"):
        check_prompt_lengths(prompts, tmp_path, max_new_tokens=10)


def test_prompts_are_numbered_through_all_batches(model, monkeypatch):
    monkeypatch.setattr(lengths, "BATCH", 2)
    short = [Prompt(content="x")] * 4
    check_prompt_lengths(short, model, max_new_tokens=10)
    with pytest.raises(ConfigError, match="prompt 5 has 42 tokens"):
        check_prompt_lengths([*short, Prompt(content="x" * 40)], model, max_new_tokens=10)


def test_prompt_that_the_chat_template_refuses_is_named(model, tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'x' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    tokenizer.save_pretrained(tmp_path)
    Qwen3Config(max_position_embeddings=32).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match="prompt 1: the model's chat template refuses it: roles must alternate"
    ):
        check_prompt_lengths([Prompt(content="x")], tmp_path, max_new_tokens=1)


def test_template_that_is_missing_is_said_so(model, tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    Qwen3Config(max_position_embeddings=32).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no chat template.*: take the instruction-tuned"):
        check_prompt_lengths([Prompt(content="x")], tmp_path, max_new_tokens=1)


@pytest.mark.slow
async def test_a_process_without_transformers_has_another_one_check_and_stays_so(
    model, tmp_path, monkeypatch
):
    monkeypatch.delitem(sys.modules, "transformers")
    prompts = store_prompts([Prompt(content="short"), Prompt(content="y" * 21)], tmp_path)
    await once(check_prompt_lengths, prompts, model, 9)
    with pytest.raises(ConfigError, match="prompt 2 has 23 tokens"):
        await once(check_prompt_lengths, prompts, model, 10)
    assert "transformers" not in sys.modules
