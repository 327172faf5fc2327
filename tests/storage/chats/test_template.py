"""Tool calls of a chat are given to a template in the form that it takes."""

import json

import pytest
from transformers import Qwen3Config

from bus.messages import Prompt
from learner.initial.scratch_model import character_tokenizer
from storage.chats.template import ChatRefusedError, ChatTemplate
from storage.prompts.length_check import check_prompt_lengths
from tests.published_chats import CHATS, tokenizer_of, tokenizer_of_chat

ARGUMENTS = {"value": 'it\'s "so"\nß', "n": 3}
CALL = {"id": "abcdefghi", "function": {"name": "probe", "arguments": ARGUMENTS}}
ASKED = {"role": "user", "content": "?"}
ANSWERED = {"role": "tool", "tool_call_id": "abcdefghi", "content": "done"}


def chat(arguments) -> list[dict]:
    call = {**CALL, "function": {**CALL["function"], "arguments": arguments}}
    return [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, ANSWERED]


@pytest.mark.parametrize("family", CHATS)
def test_arguments_as_json_text_are_written_as_those_of_an_object_are(family):
    template = ChatTemplate(tokenizer_of_chat(CHATS[family]))
    text = template.render(chat(json.dumps(ARGUMENTS)))
    assert text == template.render(chat(ARGUMENTS))
    assert "so" in text
    assert not any(wrong in text for wrong in ('\\"value', "{'value'"))


def test_a_template_that_would_write_a_mapping_as_python_gets_text():
    written = "{% for m in messages %}{{ m.tool_calls[0].function.arguments if m.tool_calls }}{% endfor %}"
    template = ChatTemplate(tokenizer_of("probe" + written, ("</s>",), "</s>"))
    assert json.loads(template.render(chat(ARGUMENTS)).removeprefix("probe")) == ARGUMENTS


def test_kimis_ids_have_the_name_of_the_function_in_answers_too():
    tokenizer = tokenizer_of_chat(CHATS["Kimi K2"])
    tokenizer.chat_template += "{{ messages[-1].tool_call_id }}"
    text = ChatTemplate(tokenizer).render(chat(ARGUMENTS), go_on=False)
    assert "<|tool_call_begin|>functions.probe:0<" in text
    assert text.endswith("functions.probe:0")


def test_what_no_form_helps_is_refused_with_the_templates_words():
    template = ChatTemplate(tokenizer_of("{{ raise_exception('roles!') }}", ("</s>",), "</s>"))
    with pytest.raises(ChatRefusedError, match="roles!"):
        template.render(chat(ARGUMENTS))


def test_prompts_with_calls_are_measured_as_they_will_be_rendered(tmp_path):
    """A template that takes mappings alone raised for OpenAI's text before the first lease."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHATS["Qwen3.5"].template
    tokenizer.save_pretrained(tmp_path)
    Qwen3Config(max_position_embeddings=4096).save_pretrained(tmp_path)
    check_prompt_lengths([Prompt(content=chat(json.dumps(ARGUMENTS)))], tmp_path, max_new_tokens=8)
