"""`launch runs list`, `show` and `compare`: what they tell of the directories of runs."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

import launch
from bus.errors import ConfigError
from launch.cli import main as cli
from launch.dashboard.run_list import facts_of_runs
from launch.run_view.recorded_runs import find_run, recorded_runs
from launch.run_view.run_files import RunFiles
from launch.screens.run_tables import comparison, whole_run
from storage.disk.file_users import processes_holding
from storage.disk.run_directory import RunDirectory, run_directories
from tests.launch.recorded_run import START_S, record
from tests.users import public_directory, unprivileged


@pytest.fixture
def printed(capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return what a `launch runs` command prints for the runs in `tmp_path`."""
    monkeypatch.delenv("SLUICE_RUN", raising=False)

    def printed(*arguments: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["runs", *arguments, "--directory", str(tmp_path)])
        assert (ended.value.code or 0) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return printed


def test_every_screen_tells_the_same_of_a_run_that_trained_on_after_its_checkpoint(tmp_path, printed):
    path = record(tmp_path, "ahead", rewards=[0.5] * 15)
    (path / "progress.json").write_text(json.dumps({"stage": "rl", "step": 10, "policy_version": 11}))
    (path / "summary.json").write_text(json.dumps({"heldout_accuracy_end": 0.25}))  # of an earlier end
    facts = facts_of_runs(tmp_path, ["ahead"])[0]
    [listed] = json.loads(printed("list", "--json"))
    shown = json.loads(printed("show", "--run", "ahead", "--json"))
    told = [facts, listed, shown, launch.attach("ahead", directory=tmp_path).status().to_json()]
    assert [(one["stage"], one["step"], one["policy_version"]) for one in told] == [("rl", 15, 16)] * 4
    assert (facts["heldout"], listed["accuracy"], shown["accuracy"]) == (0.5, 0.5, 0.5)
    (path / "metrics.jsonl").unlink()  # such as on another host
    assert (facts_of_runs(tmp_path, ["ahead"])[0]["step"], recorded_runs([path])[0].step) == (10, 10)
    (path / "progress.json").unlink()
    assert (facts_of_runs(tmp_path, ["ahead"])[0]["step"], recorded_runs([path])[0].step) == (None, 0)


def test_a_list_tells_how_far_each_run_is(tmp_path: Path, printed):
    record(tmp_path, "long", rewards=[0.0] * 5 + [0.5] * 10, learner={"steps": 40})
    record(tmp_path, "ended", rewards=[0.25], stage="done")
    (tmp_path / "soaks").mkdir()
    (tmp_path / "file").touch()
    ended, long = json.loads(printed("list", "--json"))
    assert (long["run"], long["state"], long["stage"]) == ("long", "stopped", "rl")
    assert (long["step"], long["steps"], long["policy_version"]) == (15, 40, 16)
    assert (long["reward"], long["accuracy"], long["starts"]) == (0.5, 0.5, 1)
    assert (ended["run"], ended["state"]) == ("ended", "finished")
    lines = printed("list").splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["ended", "finished", "done", "1/1000"],
        ["long", "stopped", "rl", "15/40"],
    ]


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = record(tmp_path, "long", rewards=[float(step) for step in range(400)])
    monkeypatch.setattr("launch.run_view.run_files.TAIL_BYTES", 8192)
    [run] = recorded_runs([path])
    assert (run.step, run.reward) == (400, 394.5)


def test_a_run_that_has_only_begun_is_listed(tmp_path: Path):
    run = RunDirectory(tmp_path, "new")
    run.write_provenance()
    [found] = recorded_runs(run_directories(tmp_path))
    assert (found.state, found.stage, found.step, found.reward) == ("stopped", "starting", 0, None)


def test_a_garbled_file_costs_its_run_and_no_other(tmp_path: Path, printed):
    path = record(tmp_path, "bad", rewards=[0.5])
    (path / "progress.json").write_text("{")
    record(tmp_path, "good", rewards=[0.5])
    assert [run["state"] for run in json.loads(printed("list", "--json"))] == ["damaged", "stopped"]
    assert "progress.json is not JSON" in " ".join(printed("list").split())
    assert "problem" in printed("show", "--run", "bad")
    assert facts_of_runs(tmp_path, ["bad"])[0]["step"] == 1  # a page shows what the other files say


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("file", "content", "where"),
    [
        ("provenance.json", {}, "the whole of it"),
        ("provenance.json", [{}], "0.started"),
        ("provenance.json", [1], "0"),
        ("progress.json", [], "the whole of it"),
        ("progress.json", {"step": "far"}, "step"),
        ("progress.json", {"evaluations": {"1": 0.5}}, "evaluations.1"),
        ("config.json", [], "the whole of it"),
    ],
)
def test_json_of_another_shape_costs_its_run_and_no_other(
    file: str, content: object, where: str, tmp_path: Path, printed
):
    path = record(tmp_path, "bad", rewards=[0.5])
    (path / file).write_text(json.dumps(content))
    record(tmp_path, "good", rewards=[0.5])
    bad, good = json.loads(printed("list", "--json"))
    assert (bad["state"], good["state"]) == ("damaged", "stopped")
    assert bad["problem"].startswith(f"{path / file} has not the shape that a run writes ({where}: ")
    assert "problem" in printed("show", "--run", "bad")


@pytest.fixture
def public() -> Iterator[Path]:
    with public_directory() as directory:
        yield directory


def test_what_this_user_may_not_read_costs_nothing_else(public: Path):
    for name in ("closed", "half", "open"):
        record(public, name, rewards=[0.5])
    (public / "closed").chmod(0)
    (public / "half/metrics.jsonl").chmod(0)
    with unprivileged():
        found = run_directories(public)
        half, whole = recorded_runs(found)
        with pytest.raises(ConfigError, match=r"no run 'closed' in .*: there are: half, open"):
            find_run(public, "closed")
    assert [path.name for path in found] == ["half", "open"]
    assert half.state == "damaged"
    assert half.problem == f"{public}/half/metrics.jsonl cannot be read: Permission denied"
    assert (whole.run, whole.problem) == ("open", "")


def test_a_directory_of_runs_that_cannot_be_read_is_answered(public: Path):
    public.chmod(0)
    with (
        unprivileged(),
        pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\): change its"),
    ):
        run_directories(public)


def test_a_name_that_no_file_can_have_is_no_run(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no run 'x+' in .*: there is none at all"):
        find_run(tmp_path, "x" * 300)


@pytest.mark.parametrize("name", ["below/mine", "../runs/mine", "."])
def test_a_name_that_is_a_path_is_refused_whatever_lies_there(tmp_path: Path, name: str):
    (tmp_path / "below").mkdir()
    record(tmp_path / "below", "mine", rewards=[0.5])
    with pytest.raises(ConfigError, match=f"run name {re.escape(repr(name))} is a path: give the name alone"):
        find_run(tmp_path, name)


def test_a_run_in_another_directory_is_looked_for_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"no run 'mine' in {tmp_path}: there is none .*--directory"):
        find_run(tmp_path, "mine")


def test_a_run_of_another_user_may_go_on_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record(tmp_path, "ended", rewards=[0.5], stage="done")
    path = record(tmp_path, "theirs", rewards=[0.5])
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert [run.state for run in recorded_runs(run_directories(tmp_path))] == ["finished", "unseen"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert [run.state for run in recorded_runs([path])] == ["stopped"]


def test_files_that_vanish_meanwhile_take_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = record(tmp_path, "mine", rewards=[0.5])
    part = path / "replay/shard_00"
    part.mkdir(parents=True)
    (part / "kept").write_bytes(bytes(5))
    (part / "retired").write_bytes(bytes(7))
    walk = os.walk

    def retiring(directory: Path) -> Iterator[tuple]:
        for found in walk(directory):
            if "retired" in found[2]:
                (part / "retired").unlink()
            yield found

    assert whole_run(path)["bytes"]["replay"] == 12
    monkeypatch.setattr(os, "walk", retiring)
    assert whole_run(path)["bytes"]["replay"] == 5


def test_no_run_is_no_error(printed, tmp_path: Path):
    assert printed("list").startswith(f"no run in {tmp_path}: there is none at all")
    assert json.loads(printed("list", "--json")) == []


def test_processes_that_hold_a_file_are_found_and_looking_locks_nothing(tmp_path: Path):
    lock = tmp_path / "lock"
    lock.touch()
    assert processes_holding([lock]) == {lock: []}
    with lock.open():
        [pid] = processes_holding([lock])[lock]
    assert pid == json.loads(Path("/proc/self/stat").read_text().split()[0])


def test_a_run_whose_shard_is_written_goes_on(tmp_path: Path):
    path = record(tmp_path, "mine", rewards=[0.5], stage="done")
    lock = path / "replay/shard_01/.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):
        [run] = recorded_runs([path])
    assert run.state == "training"
    assert len(run.pids) == 1


def test_a_note_is_in_lists_until_it_is_empty(tmp_path: Path, printed):
    path = record(tmp_path, "mine", rewards=[0.5])
    assert "note" not in printed("list")
    assert printed("note", "the good one", "--run", "mine") == ""
    assert "the good one" in printed("list")
    assert "the good one" in printed("show", "--run", "mine")
    assert recorded_runs([path])[0].note == "the good one"
    printed("note", "not [/b], [red] or :smile:, \x1b[31m \udcff", "--run", "mine")
    for words in (("list",), ("show", "--run", "mine")):
        assert "not [/b], [red] or :smile:, \ufffd[31m \ufffd" in printed(*words)
    printed("note", "", "--run", "mine")
    assert recorded_runs([path])[0].note == ""
    assert "a note has at most 2000 characters" in printed("note", "x" * 2001, "--run", "mine", status=2)


def test_a_run_whose_learner_waits_for_long_says_for_what_and_since_when(tmp_path: Path, printed):
    path = record(tmp_path, "mine", rewards=[0.5])
    noted = {"waits_for": "waiting for the batch: 3 of 4 groups are stored", "since_s": START_S}
    (path / "waiting.json").write_text(json.dumps(noted))
    [over] = recorded_runs([path])
    assert (over.state, over.waits_for) == ("stopped", "")  # its learner was killed and waits no more
    with (path / "storage.lock").open("w"):  # the one file that it holds here if all shards are elsewhere
        assert recorded_runs([path])[0].state == "waiting"
    learner = subprocess.Popen(["sleep", "600"])
    with (path / "lock").open("w"):
        (path / "waiting.json").write_text(json.dumps(noted | {"host": platform.node(), "pid": learner.pid}))
        assert recorded_runs([path])[0].state == "waiting"
        (path / "waiting.json").write_text(json.dumps(noted | {"host": platform.node()}))  # and no process
        assert recorded_runs([path])[0].state == "waiting"
        (path / "waiting.json").write_text(json.dumps(noted | {"host": platform.node(), "pid": learner.pid}))
        learner.kill()
        learner.wait()
        assert recorded_runs([path])[0].state == "training"
        (path / "waiting.json").write_text(json.dumps(noted | {"host": "elsewhere", "pid": learner.pid}))
        [run] = recorded_runs([path])
        facts = facts_of_runs(tmp_path, ["mine"])[0]
        shown = [" ".join(printed(*words).split()) for words in (("list",), ("show", "--run", "mine"))]
    assert (run.state, run.waits_for, run.waits_since) == ("waiting", noted["waits_for"], START_S)
    assert (facts["state"], facts["waits_for"]) == ("waiting", noted["waits_for"])
    for text in shown:
        assert "the learner is waiting for the batch: 3 of 4 groups are stored, since 2023-11-1" in text


def test_a_run_whose_process_is_suspended_says_so_beside_its_state(tmp_path: Path, printed):
    path = record(tmp_path, "mine", rewards=[0.5])
    with (path / "lock").open("w") as lock:
        learner = subprocess.Popen(["sleep", "600"], stdout=lock)
    try:
        for number, state, said in ((SIGSTOP, os.WUNTRACED, True), (SIGCONT, os.WCONTINUED, False)):
            learner.send_signal(number)
            os.waitpid(learner.pid, state)
            [run] = recorded_runs([path])
            assert run.state == "training"
            assert (f"`kill -CONT {learner.pid}` lets them go on" in run.problem) is said
            assert run.stepped == START_S + 10
            assert "mine: no step since 2023-11-1" in printed("list"), "its figures are of then"
            assert ("a signal has stopped processes" in " ".join(printed("list").split())) is said
    finally:
        learner.kill()
        learner.wait()


def test_show_tells_settings_that_are_not_the_defaults(tmp_path: Path, printed):
    loss = {"type": "cispo", "highest_weight": 4.0}
    record(tmp_path, "mine", rewards=[0.5, 0.75], learner={"loss": loss, "steps": 7})
    found = json.loads(printed("show", "--run", "mine", "--json"))
    assert found["settings"] == {
        "data.task": "sort", "learner.steps": 7, "learner.loss.type": "cispo",
        "learner.loss.highest_weight": 4.0,
    }  # fmt: skip
    assert found["evaluations"] == {"3": 0.5}
    assert found["checkpoints"] == [2]
    assert found["bytes"]["metrics.jsonl"] > 100
    shown = printed("show", "--run", "mine")
    assert "step 2 of 7" in shown
    assert "learner.loss.highest_weight" in shown


def test_defaults_are_no_choice(tmp_path: Path):
    record(tmp_path, "mine", rewards=[0.5])
    assert RunFiles(tmp_path / "mine").chosen_settings == {"data.task": "sort"}


def test_runs_are_compared_at_the_last_step_that_both_have(tmp_path: Path, printed):
    record(tmp_path, "a", rewards=[0.0, 0.2, 0.4, 0.9], learner={"steps": 7})
    record(tmp_path, "b", rewards=[0.5, 0.7])
    found = comparison([tmp_path / "a", tmp_path / "b"])
    assert found["settings"] == {"learner.steps": [7, 1000]}
    assert found["versions"] == {}
    assert found["shared_step"] == 2
    assert found["at_shared_step"]["reward"] == pytest.approx([0.1, 0.6])
    assert found["at_shared_step"]["seconds"] == [10.0, 10.0]
    assert found["results"]["reward"] == pytest.approx([0.375, 0.6])
    assert found["results"]["seconds_waiting"] == [16.0, 8.0]
    assert json.loads(printed("compare", "a", "b", "--json")) == found
    lines = [line.split() for line in printed("compare", "a", "b").splitlines()]
    assert ["learner.steps", "7", "1000"] in lines
    assert ["at", "step", "2"] in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "--run", "mien"), "no run 'mien' in {}: did you mean 'mine'? there are: mine"),
        (("show", "--run", "x"), "no run 'x' in {}: there are: mine"),
        (("compare", "mine"), "1 run to compare: give the names of two at least"),
        (("compare",), "no run to compare: give the names of two at least"),
    ],
)
def test_a_run_that_is_not_there_is_answered(arguments: tuple, message: str, tmp_path: Path, printed):
    record(tmp_path, "mine", rewards=[0.5])
    assert printed(*arguments, status=2) == f"launch: {message.format(tmp_path)}\n"
    assert find_run(tmp_path, "mine") == tmp_path / "mine"
