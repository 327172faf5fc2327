"""`--sft` stands for settings that train once over a file of demonstrations."""

import json
from pathlib import Path

import pytest

from launch.settings.short_forms import supervised_sources


@pytest.mark.parametrize(
    ("rows", "given", "expected"),
    [
        (640, {}, (10, 64, 1)),
        (641, {}, (11, 64, 1)),
        (641, {"batch_size": "8"}, (81, 8, 8)),
        (641, {"batch_size": "none"}, (11, 64, 1)),  # refused with all settings
        (5, {}, (1, 5, 0)),  # and not 64 of 5 rows
    ],
)
def test_it_is_once_over_in_the_batches_that_are_asked_for(tmp_path: Path, rows, given, expected):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps({'prompt': 'a', 'response': 'b'})}\n" * rows)
    [source] = supervised_sources(file, None, {"warmup": given})
    found = source.layer["warmup"]
    assert (found["steps"], found["batch_size"], found["optimizer"]["warmup_steps"]) == expected
