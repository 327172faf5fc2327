"""Tools of prompts: how they are read, refused, copied, told apart and counted in the length of a prompt."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import Qwen3Config

from bus.codec import decode, encode
from bus.errors import ConfigError
from bus.evaluation_messages import PromptSet
from bus.messages import Prompt
from learner.initial.scratch_model import character_tokenizer
from storage.prompt_files.dataset import encoded_prompts, load_prompts
from storage.prompt_files.stored_prompts import digest_of, store_prompts
from storage.prompts.length_check import long_prompts
from storage.prompts.sources import load_sources
from storage.settings.data import PromptKeys, SourceConfig

KEYS = PromptKeys()


def tool(name: str, **properties: object) -> dict[str, object]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


WEATHER, CLOCK = tool("weather", city={"type": "string"}), tool("clock", zone={"type": "integer"})
OFFERED = [[WEATHER], [CLOCK], []]
"""Tools of three prompts, whose arguments differ."""
PROMPTS = [Prompt(content=f"p{n}", tools=tools) for n, tools in enumerate(OFFERED)]


def jsonl(directory: Path, *tools: object, field: str = "tools") -> Path:
    path = directory / "train.jsonl"
    rows = [{"prompt": f"p{n}", **({field: one} if one else {})} for n, one in enumerate(tools)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(directory: Path, *tools: object) -> Path:
    path = directory / "train.parquet"
    pq.write_table(pa.table({"prompt": [f"p{n}" for n in range(len(tools))], "tools": list(tools)}), path)
    return path


def dataset_directory(directory: Path, *tools: object) -> Path:
    table = pa.table({"prompt": [f"p{n}" for n in range(len(tools))], "tools": list(tools)})
    (directory / "saved").mkdir()
    path = directory / "saved/data-00000-of-00001.arrow"
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return directory / "saved"


@pytest.mark.parametrize("write", [jsonl, parquet, dataset_directory])
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_are_read_from_lists_and_from_json_texts(tmp_path, write, as_text):
    tools = [json.dumps(one) if one and as_text else one or None for one in OFFERED]
    assert load_prompts(write(tmp_path, *tools), KEYS) == PROMPTS  # also where Parquet filled in nulls


def test_another_field_serves_and_an_empty_name_reads_none(tmp_path):
    path = jsonl(tmp_path, [WEATHER], field="functions")
    assert load_prompts(path, PromptKeys(tools="functions")) == PROMPTS[:1]
    assert load_prompts(path, KEYS) == [Prompt(content="p0")]
    assert load_prompts(jsonl(tmp_path, "not tools"), PromptKeys(tools="")) == [Prompt(content="p0")]
    with pytest.raises(ConfigError, match=r"line 1: no key 'function'; did you mean 'functions'\?"):
        load_prompts(jsonl(tmp_path, [WEATHER], field="functions"), PromptKeys(tools="function"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{oops", r"'tools' is a text that is no JSON \(.*\), '{oops': write tools like .*data.keys.tools"),
        (7, "'tools' is a number, not a list: write tools like"),
        ('{"type": "function"}', "'tools' is an object, not a list"),
        ([["x"]], "'tools': tool 0 is a list, not an object"),
        ([WEATHER, {"name": "clock"}], "'tools': tool 1 has the type None, not 'function'"),
        ([{"type": "function", "function": "f"}], "tool 0: its function is a text"),
        ([{"type": "function", "function": {"name": ""}}], "tool 0: its name is an empty text"),
        ([tool("f") | {"function": {"name": "f", "parameters": []}}], "'f': its parameters is a list"),
        ([WEATHER, WEATHER], "'tools' has two tools named 'weather': name one otherwise"),
        ([tool("f", big={"default": 2**70})], "cannot be sent"),
    ],
)
def test_what_are_no_tools_is_refused_with_file_row_and_value(tmp_path, value, message):
    path = jsonl(tmp_path, [WEATHER], value)
    with pytest.raises(ConfigError, match=message) as raised:
        load_prompts(path, KEYS)
    assert str(raised.value).startswith(f"{path}, line 2: ")


def test_tools_are_part_of_a_prompt_wherever_it_goes(tmp_path):
    assert list(store_prompts(PROMPTS, tmp_path)) == PROMPTS
    assert list(decode(encoded_prompts(PROMPTS, "here"), PromptSet).prompts) == PROMPTS
    assert decode(encode(PROMPTS[0]), Prompt) == PROMPTS[0]
    sources = [SourceConfig(name="a", prompts=jsonl(tmp_path, *OFFERED), reward="math")]
    assert [prompt.tools for prompt in load_sources(sources, KEYS, tmp_path)[0]] == OFFERED


def test_tools_tell_prompts_apart_and_prompts_without_keep_their_digest():
    plain = [
        Prompt(content="sort 21", label="12", metadata={"level": 1}),
        Prompt(content=[{"role": "user", "content": "a"}]),
    ]
    assert digest_of(plain) == "318f29b4afd514e1e993f34efa162bd9"  # as it was before prompts had tools
    assert len({digest_of([Prompt(content="p", tools=tools)]) for tools in OFFERED}) == 3


def test_tools_count_in_the_length_of_a_prompt(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson if tools }}{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    Qwen3Config(max_position_embeddings=32).save_pretrained(tmp_path)
    found = list(long_prompts(PROMPTS, tmp_path, max_new_tokens=10))
    assert [one.index for one in found] == [0, 1]
