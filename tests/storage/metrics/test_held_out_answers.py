"""The database of answers to held-out prompts: bounded, durable, and apart from what is trained on."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bus.codec import decode, encode
from bus.errors import SchemaError, StorageError
from bus.evaluation_messages import HeldOutAnswers
from bus.trajectory import TrajectoryBatch
from storage.metrics import held_out_answers
from storage.metrics.held_out_answers import HeldOutStore
from tests.factories import make_trajectory


def answers(version: int, prompt: int, data_set: str = "") -> HeldOutAnswers:
    t = make_trajectory(prompt, 0, group_size=1)
    untrained = replace(t, trainable=False, loss_mask=np.zeros_like(t.loss_mask))
    return HeldOutAnswers(
        policy_version=version, prompt=prompt, data_set=data_set, batch=TrajectoryBatch.of([untrained])
    )


def kept(store: HeldOutStore) -> list[tuple[str, int, int]]:
    found = store.read(store.numbers()).values()
    return sorted((one.data_set, one.policy_version, one.prompt) for one in found)


def test_answers_of_the_latest_evaluations_of_each_set_are_kept(tmp_path: Path):
    store = HeldOutStore(tmp_path / "held_out.sqlite")
    assert store.numbers() == []
    for version in (10, 20, 30):
        store.keep([answers(version, 0), answers(version, 1)], evaluations=2)
    store.keep([answers(5, 0, "aime"), answers(30, 1)], evaluations=2)  # the last one comes once more
    assert kept(store) == [("", 20, 0), ("", 20, 1), ("", 30, 0), ("", 30, 1), ("aime", 5, 0)]
    store.keep([answers(15, 0)], evaluations=2)  # of a learner that went back to an earlier step
    assert kept(store) == [("", 15, 0), ("", 30, 0), ("", 30, 1), ("aime", 5, 0)]


def test_a_database_has_its_name_once_it_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = HeldOutStore(tmp_path / "held_out.sqlite")
    with monkeypatch.context() as patch:
        patch.setattr(held_out_answers, "_SCHEMA", "CREATE NOTHING")  # as where storage ends at this point
        with pytest.raises(StorageError, match="cannot be used"):
            store.keep([answers(10, 0)], evaluations=2)
    assert store.numbers() == []
    store.keep([answers(20, 0)], evaluations=2)
    assert kept(store) == [("", 20, 0)]
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_storage_that_is_killed_in_mid_write_leaves_what_it_had_acked(tmp_path: Path):
    store = HeldOutStore(tmp_path / "held_out.sqlite")
    store.keep([answers(10, 0)], evaluations=2)
    program = (
        "import os, sqlite3, sys\n"
        "sql = sqlite3.connect(sys.argv[1])\n"
        "insert = 'INSERT INTO answers (data_set, version, prompt, body) VALUES (?, ?, ?, ?)'\n"
        "sql.executemany(insert, [('', 20, n, bytes(1 << 20)) for n in range(16)])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, store.path], check=False, timeout=60)
    assert ended.returncode == -9
    assert kept(store) == [("", 10, 0)]
    store.keep([answers(20, 0)], evaluations=2)
    assert kept(store) == [("", 10, 0), ("", 20, 0)]


def test_what_could_be_trained_and_what_is_no_database_is_refused(tmp_path: Path):
    one = answers(10, 0)
    [t] = one.batch.trajectories
    sampled = make_trajectory(0, 0, group_size=1).loss_mask
    for changed in (replace(t, trainable=True, loss_mask=sampled), replace(t, loss_mask=sampled)):
        message = encode(replace(one, batch=TrajectoryBatch.of([changed])))
        with pytest.raises(SchemaError, match="answers a held-out prompt and must not be trainable"):
            decode(message, HeldOutAnswers)
    with pytest.raises(SchemaError, match="there are no answers to held-out prompt 0"):
        decode(encode(replace(one, batch=TrajectoryBatch.of([]))), HeldOutAnswers)
    path = tmp_path / "held_out.sqlite"
    assert HeldOutStore(path).read([1]) == {}
    path.write_bytes(os.urandom(4096))
    with pytest.raises(StorageError, match=r"held_out\.sqlite cannot be used .*: restore or remove it"):
        HeldOutStore(path).keep([one], evaluations=2)
