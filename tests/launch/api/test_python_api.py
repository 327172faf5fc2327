"""`import launch`: runs from a program, by the directories that runs leave, and what a start refuses."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import structlog

import launch
from actors.environments.single_turn import SingleTurn
from bus.agent_rewards import are_equal
from launch.api.child import LocalProcess
from launch.api.run import NewHeldOutAnswers
from launch.settings.run_config import RunConfig
from launch.trajectories.stored_groups import GroupReader
from launch.trajectories.training import is_greedy
from storage.disk.run_directory import RunDirectory
from storage.metrics.held_out_answers import HeldOutStore
from storage.metrics.records import append_records, metrics_record
from tests.launch.dashboard.run_on_disk import GROUPS_A_STEP, SAMPLES, WORDS, make_run, write_held_out_answers
from tests.launch.messages import metrics

HEAVY = ("numpy", "torch", "transformers", "megatron", "zarr", "nats", "pydantic")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of 20 steps, with the groups of the last three in store."""
    return make_run(tmp_path_factory.mktemp("runs"), "done", steps=20)


def attached(run: RunDirectory) -> launch.Run:
    return launch.attach(run.name, directory=run.path.parent)


def test_importing_is_quick_and_every_public_name_is_there():
    said = f"import launch, sys; print([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert [name for name in launch.__all__ if getattr(launch, name).__doc__ is None] == []
    assert set(launch.__all__) <= set(dir(launch))
    with pytest.raises(AttributeError, match="has no attribute 'begin'"):
        launch.begin  # noqa: B018 - its absence is what is looked at


def test_an_ended_run_tells_its_steps_and_evaluations(ended: RunDirectory):
    run = attached(ended)
    assert [step.step for step in run.steps()] == [*range(1, 21)]
    assert [evaluation.policy_version for evaluation in run.evaluations()] == [11, 21]
    rows = list(run.metrics())
    assert (len(rows), rows[0]["step"]) == (22, 1)
    assert (run.running, run.status().state, run.name) == (False, "finished", "done")
    assert repr(run).startswith("<Run 'done', finished, in ")


def test_an_ended_run_tells_its_trajectories_with_their_text(ended: RunDirectory):
    run = attached(ended)
    found = list(run.trajectories())
    assert [t.lease_id for t in found] == [n for n in range(3 * GROUPS_A_STEP) for _ in range(SAMPLES)]
    [first, *_] = found
    assert run.decode(first.token_ids[first.turns[0].start :][:2].tolist()) == f"{WORDS[6]} {WORDS[7]} "


def test_answers_to_held_out_prompts_come_as_they_are_kept(ended: RunDirectory, monkeypatch):
    monkeypatch.setattr("launch.api.run.AT_ONCE", 1)
    run = attached(ended)
    assert list(run.trajectories(held_out=True)) == []
    write_held_out_answers(ended, 20)
    write_held_out_answers(ended, 21, "hard")
    found = list(run.trajectories(held_out=True))
    assert [t.trajectory_id for t in found] == [f"h{n:08}.{k}" for n in range(1, 5) for k in range(2)]
    assert [t.metadata["data_set"] for t in found] == ["heldout"] * 4 + ["hard"] * 4
    assert [is_greedy(t) for t in found] == [False, True] * 4
    assert all(run.decode(t.token_ids.tolist()) for t in found)
    assert next(iter(run.trajectories())).trajectory_id == "g00000000.0"
    take = NewHeldOutAnswers(ended)
    assert [t.trajectory_id for t in take()] == ["h00000001.0", "h00000001.1"]
    read = HeldOutStore.read
    monkeypatch.setattr(HeldOutStore, "read", lambda s, numbers: {} if numbers == [2] else read(s, numbers))
    assert [t.trajectory_id for t in take()] == ["h00000003.0", "h00000003.1"], "2 was removed meanwhile"


def test_groups_that_cannot_be_read_do_not_end_the_trajectories(ended: RunDirectory, monkeypatch):
    read = GroupReader.read
    monkeypatch.setattr("launch.api.run.AT_ONCE", 2)
    monkeypatch.setattr(
        GroupReader, "read", lambda groups, leases: read(groups, leases) if 0 not in leases else []
    )
    leases = {trajectory.lease_id for trajectory in attached(ended).trajectories()}
    assert leases == {*range(2, 3 * GROUPS_A_STEP)}


async def test_async_iteration_tells_the_same(ended: RunDirectory):
    run = attached(ended)
    assert [step async for step in run.steps()] == list(run.steps())
    assert [t.trajectory_id async for t in run.trajectories()] == [
        t.trajectory_id for t in run.trajectories()
    ]


async def test_a_failed_run_tells_what_it_did_before_its_error(tmp_path: Path):
    directory = make_run(tmp_path, "failed", steps=2)
    run = launch.Run(directory, ended_with(2, "launch: no prompts\n", directory.logs / "local.log"))
    waiting, awaiting = iter(run.steps()), aiter(run.steps())
    assert [next(waiting).step, next(waiting).step] == [1, 2]
    with pytest.raises(launch.ConfigError, match="no prompts"):
        next(waiting)
    assert [(await anext(awaiting)).step, (await anext(awaiting)).step] == [1, 2]
    with pytest.raises(launch.ConfigError, match="no prompts"):
        await anext(awaiting)


def test_a_run_that_failed_before_it_had_stores_says_why(tmp_path: Path):
    directory = RunDirectory(tmp_path, "failed")
    run = launch.Run(directory, ended_with(2, "launch: no prompts\n", directory.logs / "local.log"))
    with pytest.raises(launch.ConfigError, match="no prompts"):
        list(run.trajectories())


async def test_a_run_that_goes_on_is_followed_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("launch.api.run.POLL_S", 0.01)
    directory = make_run(tmp_path, "live", steps=2)
    run, seen, both = attached(directory), [], asyncio.Event()
    loop = asyncio.get_running_loop()
    with (directory.path / "lock").open("w"):  # held by this process: the run goes on

        def follow() -> None:
            for step in run.steps():
                seen.append(step.step)
                if step.step == 2:
                    loop.call_soon_threadsafe(both.set)

        following = threading.Thread(target=follow)
        following.start()
        await both.wait()
        append_records(directory.metrics, [metrics_record(metrics(3))])
        assert run.running
        with pytest.raises(launch.SluiceError, match="goes on"):
            run.result()
        with pytest.raises(TimeoutError, match="'live' goes on after 0 s"):
            run.wait(timeout_s=0)
    await asyncio.to_thread(following.join)
    assert seen == [1, 2, 3]


def test_a_run_whose_stores_are_not_made_yet_has_no_trajectories(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("launch.api.run.POLL_S", 0.0)
    directory = RunDirectory(tmp_path, "young")
    directory.config.write_text(RunConfig(run="young").model_dump_json())
    looks = iter([True, True, False, False])
    monkeypatch.setattr(launch.Run, "running", property(lambda run: next(looks)))
    with pytest.raises(launch.ConfigError, match="its shard is on another host"):
        list(attached(directory).trajectories())


def test_the_result_is_that_of_the_summary(tmp_path: Path):
    directory = make_run(tmp_path, "done", steps=2)
    told = {
        "run": "done", "stage": "done", "steps": 2, "policy_version": 3, "heldout_accuracy_start": None,
        "heldout_accuracy_end": 0.5, "wall_s": 7.5, "trajectories_trained": 16, "max_staleness_seen": 1,
        "export": "runs/done/export", "checkpoint": None,
    }  # fmt: skip
    directory.summary.write_text(json.dumps(told))
    result = attached(directory).wait()
    assert (result.stage, result.steps, result.accuracy_start, result.accuracy_end) == ("done", 2, None, 0.5)
    assert (result.export, result.checkpoint) == (Path("runs/done/export"), None)
    assert result.summary == told
    directory.summary.unlink()
    with pytest.raises(launch.SluiceError, match=r"summary\.json is missing"):
        attached(directory).result()


def test_attaching_names_the_nearest_run(ended: RunDirectory):
    with pytest.raises(launch.ConfigError, match=r"no run 'don' in .* did you mean 'done'"):
        launch.attach("don", directory=ended.path.parent)


# --- start ---


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preset": "sortt"}, "did you mean 'sort'"),
        ({"learner": {"stepps": 3}}, r"learner\.stepps"),
        ({"stepps": 3}, "stepps"),
        ({"run": "a b"}, "cannot be part of a NATS subject"),
        ({"config": "none.toml"}, "cannot read the configuration"),
        ({"prompts": ["a"], "learner": {"stepps": 3}}, r"learner\.stepps"),
        ({"prompts": ["a"], "reward": lambda answer: 1.0}, "<lambda> has no name of its own"),
    ],
)
def test_a_start_refuses_what_cannot_work_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], said: str
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(launch.ConfigError, match=said):
        launch.start(**given)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What would be started: arguments and environment; it ends at once with status 0."""
    started: list[tuple] = []

    def start(arguments: tuple[str, ...], environment: dict[str, str], output: Path) -> LocalProcess:
        started.append((arguments, environment))
        return ended_with(0, "", output)

    monkeypatch.setattr("launch.api.start.start_local", start)
    return started


def ended_with(status: int, said: str, output: Path) -> LocalProcess:
    with output.open("ab") as file:
        begins = file.tell()
        program = f"import sys; sys.stdout.write({said!r}); sys.exit({status})"
        process = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=file)
    process.wait()
    return LocalProcess(process, output, begins)


def test_the_process_gets_all_settings_and_a_password_by_its_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: list[tuple]
):
    monkeypatch.setenv("SLUICE_DIRECTORY", str(tmp_path / "all"))
    (tmp_path / "mine.toml").write_text("seed = 3\n[learner]\nsteps = 7\ntarget_accuracy = 'none'\n")
    url = "nats://me:secret@host:4222"
    run = launch.start(
        "sort", config=tmp_path / "mine.toml", reward="contains", run="mine", learner={"steps": 9},
        bus={"url": url},
    )  # fmt: skip
    assert run.path == tmp_path / "all/mine"
    [((option, file), environment)] = commands
    assert (option, environment["SLUICE_BUS"]) == ("--config", url)
    assert "SLUICE_DIRECTORY" not in environment
    settings = json.loads(Path(file).read_text())
    assert (settings["run"], settings["seed"], settings["data"]["task"]) == ("mine", 3, "sort")
    assert (settings["learner"]["steps"], settings["learner"]["target_accuracy"]) == (9, None)
    assert settings["actors"]["environment"]["reward"] == "contains"
    assert "secret" not in Path(file).read_text()


def test_prompts_and_a_class_may_be_given_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: list[tuple]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "mine")
    prompts = ["1+1?", {"prompt": "2+2?", "label": "4"}]
    run = launch.start(prompts=prompts, environment=SingleTurn)
    [((_, file), environment)] = commands
    settings = json.loads(Path(file).read_text())
    given = run.path / "given"
    assert environment["PYTHONPATH"] == f"{given}{os.pathsep}mine"
    assert Path(settings["data"]["prompts"]) == given / "prompts.jsonl"
    assert len((given / "prompts.jsonl").read_text().splitlines()) == len(prompts)
    named = "actors.environments.single_turn:SingleTurn"
    assert settings["actors"]["environment"] == {"type": "plugin", "environment": named}
    launch.start(prompts=prompts, run="other", reward=are_equal)
    assert json.loads(Path(commands[1][0][1]).read_text())["actors"]["environment"]["reward"] == (
        "bus.agent_rewards:are_equal"
    )


def test_a_run_that_goes_on_is_not_started_again_and_keeps_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: list[tuple]
):
    monkeypatch.chdir(tmp_path)
    first = launch.start("sort", run="mine", seed=1)
    with (first.path / "lock").open("w") as lock:
        lock.write(str(os.getpid()))
        lock.flush()
        with pytest.raises(launch.ConfigError, match=f"'mine' is already going on .* process {os.getpid()}"):
            launch.start("sort", run="mine", seed=2)
    assert json.loads((first.path / "start.json").read_text())["seed"] == 1
    assert len(commands) == 1


def test_a_run_is_found_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: list[tuple]
):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "earlier", steps=1)
    runs = launch.start("sort", run="mine"), launch.attach("earlier")
    monkeypatch.chdir("/")
    assert [run.path for run in runs] == [tmp_path / "runs" / name for name in ("mine", "earlier")]


def test_a_warning_is_kept_apart_from_what_the_program_prints(
    ended: RunDirectory, capsys: pytest.CaptureFixture[str]
):
    structlog.reset_defaults()
    attached(ended)
    structlog.get_logger().warning("run_still_ends")
    assert [("run_still_ends" in text) for text in capsys.readouterr()] == [False, True]
    own = structlog.testing.CapturingLogger()
    structlog.configure(logger_factory=lambda *_: own)
    attached(ended)
    structlog.get_logger().warning("run_still_ends")
    assert len(own.calls) == 1


def test_a_process_that_never_holds_its_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("launch.api.child.HOLD_TIMEOUT_S", 0.0)
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(launch.SluiceError, match=f"process {process.pid}, has not checked its settings"):
            LocalProcess(process, tmp_path / "local.log", 0).wait_until_held(tmp_path / "lock")
    finally:
        process.communicate()


def test_a_process_that_fails_raises_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    output = tmp_path / "local.log"
    output.write_text("launch: of an earlier start\n")
    for status, said, kind, message in (
        (2, "launch: no prompts\n", launch.ConfigError, "^no prompts$"),
        (65, "launch: torn\n", launch.LostDataError, "^torn$"),
        (75, "launch: away\n", launch.BusAwayError, "^away$"),
        (
            1,
            "Traceback\nKeyError\n",
            launch.SluiceError,
            r"status 1; the end of .*local\.log:\n(?s:.*)KeyError",
        ),
    ):
        with pytest.raises(kind, match=message):
            raise ended_with(status, said, output).failure()
    assert ended_with(0, "", output).failure() is None
    failed = launch.Run(RunDirectory(tmp_path, "mine"), ended_with(2, "launch: no prompts\n", output))
    for ending in (failed.wait, lambda: list(failed.steps())):
        with pytest.raises(launch.ConfigError, match="no prompts"):
            ending()
