import json
import platform
import sys
from contextlib import suppress

import pytest

from bus.errors import ConfigError, LostDataError
from storage.disk import run_directory
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory


@pytest.mark.parametrize("name", ["", "a.b", "a b", "a/b", "..", "a*", ">", "é", "x" * 65, "a\n"])
def test_a_name_that_cannot_be_a_subject_token_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="use 1 to 64 of A-Z, a-z, 0-9, _ and -"):
        RunDirectory(tmp_path, name)


def test_looking_for_a_run_creates_nothing(tmp_path):
    run = RunDirectory(tmp_path / "runs", "sort-1")
    assert not run.exists
    assert list(tmp_path.iterdir()) == []


def test_every_path_is_ready_to_be_written(tmp_path):
    run = RunDirectory(tmp_path / "runs", "sort-1")
    root = tmp_path / "runs" / "sort-1"
    files = {"config.json": run.config, "metrics.jsonl": run.metrics, "summary.json": run.summary}
    files |= {"curves.png": run.curves, "ledger.sqlite": run.ledger, "provenance.json": run.provenance}
    for name, path in files.items():
        assert path == root / name
        path.write_bytes(b"{}")
    folders = {"checkpoints": run.checkpoints, "export": run.export, "data": run.data, "logs": run.logs}
    folders |= {"bus": run.bus, "replay/shard_00": run.replay(0), "replay/shard_11": run.replay(11)}
    for name, path in folders.items():
        assert path == root / name
        assert path.is_dir()
    assert run.exists


def test_json_is_replaced_whole(tmp_path):
    run = RunDirectory(tmp_path, "a")
    write_json(run.summary, {"accuracy": 0.9})
    write_json(run.summary, {"accuracy": 1.0})
    assert json.loads(run.summary.read_text()) == {"accuracy": 1.0}
    assert [path.name for path in run.path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("garbled", [b"", b'[{"started": "20', b"\xff\x00"], ids=["empty", "cut", "binary"])
def test_a_garbled_provenance_names_the_file_and_the_remedy(tmp_path, garbled):
    run = RunDirectory(tmp_path, "a")
    run.provenance.write_bytes(garbled)
    for read in (run.refuse_other_format, run.write_provenance):
        with pytest.raises(
            LostDataError, match=r"a/provenance\.json is not JSON .*: remove it: it only records"
        ):
            read()
    assert run.provenance.read_bytes() == garbled


def test_provenance_of_a_run_that_starts_often_keeps_the_first_and_the_latest(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "STARTS_KEPT", 2)
    numbers = iter(range(5))
    monkeypatch.setattr(run_directory, "provenance", lambda: {"n": next(numbers)})
    run = RunDirectory(tmp_path, "a")
    for _ in range(5):
        run.write_provenance()
    assert [start["n"] for start in json.loads(run.provenance.read_text())] == [0, 3, 4]


def test_provenance_keeps_every_start_and_no_password(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["launch", "actors", "--bus.url=nats://me:sec@ret@host:4222,nats://you:pw@b"]
    )
    run = RunDirectory(tmp_path, "a")
    run.write_provenance()
    run.write_provenance()
    starts = json.loads(run.provenance.read_text())
    assert len(starts) == 2
    assert starts[0]["argv"] == ["launch", "actors", "--bus.url=nats://***@host:4222,nats://***@b"]
    assert starts[0]["python"] == platform.python_version()
    assert starts[0]["host"] == platform.node()
    assert starts[0]["packages"]["zarr"].startswith("3.")
    assert {"started", "platform", "git_commit"} <= starts[0].keys()


def test_a_directory_of_an_older_build_is_refused(tmp_path):
    run = RunDirectory(tmp_path, "old")
    run.refuse_other_format()  # nothing is there yet
    run.write_provenance()
    run.refuse_other_format()
    starts = json.loads(run.provenance.read_text())
    del starts[0]["format"]  # as older builds wrote it
    write_json(run.provenance, [starts[0] | {"git_commit": "abc"}])
    for use in (run.refuse_other_format, run.write_provenance):
        with pytest.raises(ConfigError, match=r"old has format 1, this build reads format 2: .* commit abc"):
            use()


def test_a_start_that_is_refused_removes_what_it_made_and_nothing_of_others(tmp_path):
    def refused(make):
        run = RunDirectory(tmp_path / "runs", "mine")
        with suppress(ConfigError), run.unmade_on_error():
            (run.data / "prompts.jsonl").touch()
            make(run)
            raise ConfigError("a bad row")
        return run

    refused(lambda run: None)
    assert not (tmp_path / "runs").exists()
    other = RunDirectory(tmp_path / "runs", "other")
    refused(lambda run: other.config.touch())
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]
    mine = refused(lambda run: run.config.touch())  # by a second start of the same run, which goes on
    assert mine.config.exists()
    refused(lambda run: None)
    assert (mine.data / "prompts.jsonl").exists()
