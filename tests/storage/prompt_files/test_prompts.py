import json
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.codec import MAX_ITEMS, decode
from bus.errors import ConfigError
from bus.evaluation_messages import PromptSet
from bus.messages import Prompt
from storage.prompt_files.dataset import encoded_prompts, load_prompts
from storage.prompts.order import PromptOrder
from storage.settings.data import PromptKeys

KEYS = PromptKeys()
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def jsonl(directory: Path, *rows: object) -> Path:
    path = directory / "train.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def parquet(directory: Path, *rows: dict) -> Path:
    path = directory / "train.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


ROWS = [
    {"prompt": "sort 21", "label": "12", "metadata": {"level": 1}},
    {"prompt": "1+1=", "label": None, "metadata": None},
    {"prompt": "2+2=", "label": "4", "metadata": {"level": 2}},
]
PROMPTS = [
    Prompt(content="sort 21", label="12", metadata={"level": 1}),
    Prompt(content="1+1="),
    Prompt(content="2+2=", label="4", metadata={"level": 2}),
]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_prompts_load_alike_from_jsonl_and_parquet(tmp_path, write):
    assert load_prompts(write(tmp_path, *ROWS), KEYS) == PROMPTS


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize(
    ("bounds", "expected"),
    [("1:", slice(1, None)), (":2", slice(2)), ("-1:", slice(-1, None)), (":", slice(None))],
)
def test_a_slice_takes_rows_as_python_does(tmp_path, write, bounds, expected):
    path = write(tmp_path, *ROWS)
    assert load_prompts(Path(f"{path}@[{bounds}]"), KEYS) == PROMPTS[expected]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_chat_messages_are_prompts_too(tmp_path, write):
    assert load_prompts(write(tmp_path, {"prompt": CHAT}), KEYS) == [Prompt(content=CHAT)]


def test_blank_lines_are_ignored_but_counted(tmp_path):
    path = jsonl(tmp_path, "", {"prompt": "a"}, "  ", {"prompt": "b"})
    assert [p.content for p in load_prompts(path, KEYS)] == ["a", "b"]
    with pytest.raises(ConfigError, match="line 3: not JSON"):
        load_prompts(jsonl(tmp_path, "", {"prompt": "a"}, "{oops"), KEYS)


def test_numbers_become_text_labels(tmp_path):
    path = jsonl(tmp_path, {"prompt": "a", "label": 42}, {"prompt": "b", "label": 0.5})
    assert [p.label for p in load_prompts(path, KEYS)] == ["42", "0.5"]


def test_other_keys_serve_and_must_be_there_once_named(tmp_path):
    keys = PromptKeys(prompt="question", label="answer")
    path = jsonl(tmp_path, {"question": "a", "answer": "b"}, {"question": "c", "anwser": "d"})
    with pytest.raises(ConfigError, match=r"line 2: no key 'answer'; did you mean 'anwser'\?"):
        load_prompts(path, keys)
    assert load_prompts(Path(f"{path}@[:1]"), keys) == [Prompt(content="a", label="b")]


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


def test_a_label_that_pandas_left_out_is_refused(tmp_path):
    path = parquet(tmp_path, {"prompt": "a", "label": 72.0}, {"prompt": "b", "label": float("nan")})
    with pytest.raises(ConfigError, match=r"row 2: 'label' is the number nan"):
        load_prompts(path, KEYS)


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_fields_that_only_other_messages_have_are_none_of_a_message(tmp_path, write):
    """Templates such as that of Llama 3.1 ask whether a message has `tool_calls`, which null is to them."""
    calls = [
        {"id": str(n), "type": "function", "function": {"name": "f", "arguments": arguments}}
        for n, arguments in enumerate([{"city": "x"}, {"day": {"of": "y"}}, {"city": None}])
    ]
    asked = {"role": "user", "content": "hi", "name": None, "tool_calls": None}
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    [prompt] = load_prompts(write(tmp_path, {"prompt": [asked, called]}), KEYS)
    is_exact = write is jsonl  # here a null is there because somebody wrote it
    written = [{"city": "x"}, {"day": {"of": "y"}}, {"city": None} if is_exact else {}]
    assert prompt.content[0] == {"role": "user", "content": "hi"}
    assert prompt.content[1]["content"] is None
    assert [call["function"]["arguments"] for call in prompt.content[1]["tool_calls"]] == written


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{'prompt': 1}", r"line 2: not JSON \(.* at column 2\): write one object a line"),
        ('["prompt"]', r"line 2: a list, not an object: write one like \{\"prompt\": ...\}"),
        ({"promt": "a", "label": "b"}, r"no key 'prompt'; did you mean 'promt'\? .* are: 'promt', 'label'"),
        ({}, "no key 'prompt'; the keys there are: none"),
        ({"prompt": 7}, "'prompt' is a number: make it a text or a list of messages"),
        ({"prompt": None}, "'prompt' is null"),
        ({"prompt": " \n"}, "'prompt' is empty: fill it or remove the row"),
        ({"prompt": []}, "'prompt' is empty"),
        ({"prompt": ["hello"]}, "message 0 of 'prompt' is a text: make it"),
        ({"prompt": [{"role": "user", "text": "a"}]}, "message 0 of 'prompt': no key 'content'"),
        ({"prompt": [{"role": 1, "content": "a"}]}, "its role is a number: make it a text"),
        ({"prompt": [{"role": "user", "content": 1}]}, "its content is a number: make it a text"),
        ({"prompt": "a", "label": ["b"]}, "'label' is a list: make it a text or a number"),
        ({"prompt": "a", "label": True}, "'label' is a boolean"),
        ({"prompt": "a", "metadata": "x"}, "'metadata' is a text: make it an object"),
        ({"prompt": "a", "metadata": {"n": 2**70}}, "cannot be sent"),
        ({"prompt": "\ud800"}, "cannot be sent"),
        ({"prompt": "a", "metadata": {"n": nested(70)}}, "metadata: nested more than 64 deep"),
        ({"prompt": "a", "label": float("nan")}, "'label' is the number nan, as pandas writes"),
        ({"prompt": "a", "label": float("inf")}, "'label' is the number inf"),
    ],
)
def test_a_bad_row_is_reported_with_its_line_and_a_remedy(tmp_path, row, message):
    path = jsonl(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(ConfigError, match=message) as raised:
        load_prompts(path, KEYS)
    assert str(raised.value).startswith(f"{path}, line 2: ")


def test_a_bad_row_of_parquet_is_reported_with_its_number(tmp_path):
    path = parquet(tmp_path, {"prompt": "fine"}, {"prompt": ""})
    with pytest.raises(ConfigError, match="row 2: 'prompt' is empty"):
        load_prompts(path, KEYS)
    with pytest.raises(ConfigError, match="row 2: 'prompt' is empty"):
        load_prompts(Path(f"{path}@[1:]"), KEYS)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"image": b"\x89PNG"}, "'metadata.image' is a bytes"),
        ({"views": [{"at": datetime(2026, 1, 1)}]}, r"'metadata.views\[0\].at' is a datetime"),
    ],
)
def test_a_value_of_parquet_that_json_has_not_is_reported_with_row_and_column(tmp_path, metadata, named):
    path = parquet(tmp_path, {"prompt": "fine", "metadata": None}, {"prompt": "a", "metadata": metadata})
    with pytest.raises(ConfigError, match=rf"train.parquet, row 2: {named}, which cannot be sent: use texts"):
        load_prompts(path, KEYS)


def test_more_prompts_than_a_message_carries_are_refused_with_a_remedy():
    few = [Prompt(content="a")] * 3
    assert list(decode(encoded_prompts(few, "few.jsonl"), PromptSet).prompts) == few
    with pytest.raises(ConfigError, match=r"many.jsonl: 1048577 prompts, .*give a slice"):
        encoded_prompts(few[:1] * (MAX_ITEMS + 1), "many.jsonl")


def test_bytes_that_are_not_utf8_are_reported_with_their_line(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match="line 2: not readable as UTF-8 JSON"):
        load_prompts(path, KEYS)


def test_dataset_directories_are_read_split_by_split(tmp_path):
    """As the hub has them, in several files, and as `save_to_disk` writes them."""
    hub = tmp_path / "hub/data"
    hub.mkdir(parents=True)
    for n, row in enumerate(ROWS):
        parquet(tmp_path, row).rename(hub / f"train-{n:05d}-of-00003.parquet")
    assert load_prompts(tmp_path / "hub", KEYS) == PROMPTS
    assert load_prompts(Path(f"{tmp_path / 'hub'}@[1:]"), KEYS) == PROMPTS[1:]
    jsonl(tmp_path, {"prompt": "t"}).rename(hub / "test.jsonl")
    assert load_prompts(tmp_path / "hub/train", KEYS) == PROMPTS
    assert load_prompts(tmp_path / "hub/test", KEYS) == [Prompt(content="t")]
    with pytest.raises(ConfigError, match=r"hub has the splits test, train: name one, as .*hub/test"):
        load_prompts(tmp_path / "hub", KEYS)
    (saved := tmp_path / "saved/train").mkdir(parents=True)
    table = pa.Table.from_pylist(ROWS)
    for n in range(2):
        part = saved / f"data-{n:05d}-of-00002.arrow"
        with pa.OSFile(str(part), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.slice(2 * n, 2))
    assert load_prompts(saved, KEYS) == PROMPTS
    part.write_bytes(b"half of it")
    with pytest.raises(ConfigError, match=r"data-00001-of-00002.arrow: not a readable Arrow stream"):
        load_prompts(saved, KEYS)


def test_files_that_cannot_be_read_say_why_and_what_to_do(tmp_path):
    jsonl(tmp_path, {"prompt": "a"})
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    cases = {
        "trian.jsonl": r"no such file: did you mean 'train.jsonl'\?",
        "other/train.jsonl": "no such file, nor the directory",
        "train.csv": "cannot read .csv: use .jsonl or .parquet",
        "text": "cannot read a file without extension",
        "folder.jsonl": "is a directory without .jsonl, .parquet or .arrow files: name a file",
        "empty.jsonl": "holds no rows: give a file or slice with at least one",
        "train.jsonl@[5:]": r"has no rows in the slice of train.jsonl@\[5:\]",
        "train.jsonl@[5]": r"not a slice: write it as train.jsonl@\[100:200\]",
        "torn.parquet": "not a readable Parquet file",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            load_prompts(tmp_path / name, KEYS)


@given(count=st.integers(1, 50), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_each_epoch_visits_every_prompt_once(count, seed, epoch):
    order = PromptOrder(count, seed, shuffle=True)
    positions = range(epoch * count, (epoch + 1) * count)
    visited = [order.index(position) for position in positions]
    assert sorted(visited) == list(range(count))
    assert {order.epoch(position) for position in positions} == {epoch}


def test_the_order_resumes_from_any_position_and_differs_between_epochs_and_seeds():
    order = PromptOrder(100, 7, shuffle=True)
    sequence = [order.index(position) for position in range(300)]
    assert [PromptOrder(100, 7, shuffle=True).index(position) for position in (0, 150, 299)] == [
        sequence[position] for position in (0, 150, 299)
    ]
    assert sequence[:100] != sequence[100:200] != sequence[200:]
    assert [PromptOrder(100, 8, shuffle=True).index(position) for position in range(100)] != sequence[:100]


def test_the_order_is_the_same_on_every_machine_and_version():
    order = PromptOrder(8, 0, shuffle=True)
    assert [order.index(position) for position in range(16)] == [
        *[3, 2, 1, 6, 0, 7, 4, 5],
        *[7, 4, 5, 1, 6, 2, 0, 3],
    ]


def test_without_shuffling_the_file_order_repeats():
    order = PromptOrder(3, 7, shuffle=False)
    assert [order.index(position) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_no_prompts_have_no_order():
    with pytest.raises(ConfigError, match="give at least one"):
        PromptOrder(0, 7, shuffle=True)
