"""`--sft` stands for settings that train once over a file of demonstrations."""

import json
from pathlib import Path

import pytest

from bus.errors import ConfigError
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


@pytest.mark.parametrize(
    ("given", "loss", "lr"),
    [("sft", {"type": "dpo"}, 1e-6), ("dpo", None, 1e-6), ("reward_model", None, 2e-5)],
)
def test_pairs_are_for_dpo_unless_another_loss_over_pairs_is_given(tmp_path: Path, given, loss, lr):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    [source] = supervised_sources(None, file, {"warmup": {"loss": {"type": given}}})
    warmup = source.layer["warmup"]
    assert (warmup.get("loss"), warmup["optimizer"]["lr"]) == (loss, lr)
    with pytest.raises(
        ConfigError, match=r"--sft .*pairs.jsonl with --pairs .*: a run trains on one of them"
    ):
        supervised_sources(file, file, {})
