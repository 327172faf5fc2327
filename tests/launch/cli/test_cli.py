"""The command line: its help, its own errors, and how flags go over files and presets."""

import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from cyclopts import App

from launch.cli import main as cli
from launch.cli.given_settings import OfSettings
from launch.cli.preparation_commands import doctor, plan
from launch.cli.start_commands import local, try_
from launch.settings.run_config import RunConfig
from tests.command_line import ASSEMBLE

COMMANDS = ("local", "bus", "storage", "shards", "learner", "actors", "retrain", "restore", "convert")
HEAVY = {"torch", "transformers", "megatron", "zarr", "numpy", "matplotlib", "sglang", "nats", "structlog"}
MODULES = 900
"""Twice what help loads: loading more takes seconds, whatever the machine does."""
HELP_OF_EACH = """
import sys
from launch.cli import main as cli
def report(what):
    names = {name.partition(".")[0] for name in sys.modules}
    print(what, len(sys.modules), *names, sep="\\t", file=sys.stderr)
for command in sys.argv[1:]:
    print(f"\\0{command}\\0", end="")
    try:
        cli.main([*command.split(), "--help"])
    except SystemExit as ended:
        assert not ended.code, command
    report(command)
import launch.local.local
report("supervisor")
"""
FLAGS = {
    "local": ("--preset", "--config", "--prompts", "--reward", "--bus", "--learner.steps", "--seed"),
    "bus": ("--host", "--port", "--directory"),
    "storage": ("--preset", "--config", "--data.task", "replay", "--run"),
    "shards": ("--shards", "--bus", "--run", "--directory"),
    "learner": ("--bus", "--run", "--shadow", "--warmup.steps", "--learner.loss.type"),
    "retrain": ("--run", "--from-step", "--to-step", "--json", "--learner.loss.type"),
    "verify": ("--run", "--bus", "--records", "--json"),
    "witness": ("--run", "--directory", "--json"),
    "restore": ("--run", "--directory", "--archive"),
    "bench overlap": ("--model", "--learner-device", "--rounds", "--admission.max-staleness"),
    "status": ("--run", "--bus", "--creds", "--directory", "--json"),
    "tail": ("--run", "--n", "--once", "--lease", "--task", "--json", "--token-ids"),
    "runs list": ("--directory", "--json"),
    "runs compare": ("--directory", "--json"),
    "runs stop": ("--run", "--timeout-s"),
    "doctor": ("--config", "--bus", "--json", "--model.path"),
    "completion": ("bash",),
    "init": ("--preset", "--all"),
    "engines join": ("--run", "--bus", "--actor"),
    "actors": ("--bus", "--run", "--reward", "--actors.engine.type"),
}


def run_python(*arguments: str) -> subprocess.CompletedProcess:
    """A finished `python ...`."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"},
    )


@pytest.mark.slow
def test_a_process_writes_help_and_ends_well():
    done = run_python("-m", "launch", "learner", "--help")
    assert done.returncode == 0
    assert [flag for flag in FLAGS["learner"] if flag not in done.stdout] == []


@pytest.fixture(scope="module")
def helped() -> subprocess.CompletedProcess:
    """A process that has written the help of all commands."""
    done = run_python("-c", HELP_OF_EACH, *FLAGS)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def helps(helped: subprocess.CompletedProcess) -> dict[str, str]:
    """The help of each command."""
    _, *parts = helped.stdout.split("\0")
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.slow
def test_the_supervisor_of_a_local_run_loads_no_torch(helped: subprocess.CompletedProcess):
    what, _, *names = helped.stderr.splitlines()[-1].split("\t")
    assert (what, {"torch", "transformers", "megatron"} & {*names}) == ("supervisor", set())
    assert "nats" in names


def test_help_of_no_command_loads_anything_heavy(helped: subprocess.CompletedProcess):
    lines = [line.split("\t") for line in helped.stderr.splitlines()[:-1]]
    assert [(command, modules) for command, modules, *_ in lines if int(modules) > MODULES] == []
    loaded = {command: set(names) for command, _, *names in lines}
    assert list(loaded) == list(FLAGS)
    assert all("pydantic" in names for names in loaded.values())
    assert [(command, names & HEAVY) for command, names in loaded.items() if names & HEAVY] == []


@pytest.mark.parametrize("command", FLAGS)
def test_help_names_the_flags(helps: dict[str, str], command: str):
    assert [flag for flag in FLAGS[command] if flag not in helps[command]] == []


def test_without_a_command_all_commands_are_listed(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert [command for command in COMMANDS if command not in said] == []


def test_who_asks_to_replay_a_run_hears_of_retrain(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["replay", "--run", "mine"])
    assert "`launch retrain` trains the steps of a run again" in capsys.readouterr().err


# --- in this process: quicker, and the work is only looked at ---


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch):
    """Run the command line up to the work; returns the work's arguments."""
    work = []

    def record(main) -> None:
        work.extend((*main.args, main.keywords))

    def call(*arguments: str) -> list:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code in (None, 0), ended.value.code
        return work

    for commands in cli.COMMANDS:
        monkeypatch.setattr(commands, "run", record, raising=False)
        monkeypatch.setattr(commands, "configure_logging", lambda *_: None, raising=False)
    return call


@pytest.fixture
def refused(call, capsys: pytest.CaptureFixture):
    """The one line that a command line is refused with."""

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        captured = capsys.readouterr()
        assert ended.value.code == 2
        assert captured.out == ""
        prefix, _, message = captured.err.partition("launch: ")
        assert prefix == ""
        assert message.count("\n") == 1
        return message.rstrip()

    return refused


def test_a_list_of_a_further_policy_is_given_in_one_flag(refused):
    targets = "--policies.rival.learner.lora.targets"
    said = refused("local", targets, "q_proj", targets, "v_proj")
    assert f"{targets} is given several times: give its values once, with commas between them" in said


def test_flags_go_over_the_file_and_the_file_over_the_preset(call, tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[learner]\nsteps = 20\nthreads = 2\n[learner.loss]\ntype = 'ppo_clip'\n")
    flags = ("--learner.threads", "3", "--learner.loss.clip-eps", "0.1", "--data.no-shuffle")
    config: RunConfig = call("local", "--preset", "sort", "--config", str(file), *flags)[0]

    assert config.run == "sort"
    assert config.learner.steps == 20
    assert config.learner.threads == 3
    assert (config.learner.loss.type, config.learner.loss.clip_eps) == ("ppo_clip", 0.1)
    assert config.data.shuffle is False


def test_short_forms_stand_for_their_settings(call):
    config: RunConfig = call(
        "storage", "--bus", "nats://there:1", "--prompts", "p.jsonl", "--reward", "contains"
    )[0]
    assert config.bus.url == "nats://there:1"
    assert config.data.prompts == Path("p.jsonl")
    assert config.actors.environment.reward == "contains"


@pytest.mark.parametrize(
    ("flags", "own"),
    [((), True), (("--bus", "nats://there:1"), False), (("--bus.url", "nats://there:1"), False)],
)
def test_local_starts_a_bus_unless_one_is_named(call, flags: tuple[str, ...], own: bool):
    assert call("local", "--data.task", "sort", *flags)[-1] == {"own_bus": own}


def test_a_joining_process_takes_the_run_from_the_bus_and_keeps_its_own_settings(call):
    flags = ("--run", "there", "--reward", "contains", "--actors.groups-at-once", "3")
    where, own, _ = call("actors", *flags)
    assert where.run == "there"
    assert own == {"actors": {"environment": {"reward": "contains"}, "groups_at_once": "3"}}


def test_a_learner_may_have_settings_that_alone_would_be_incomplete(call):
    _, own, _ = call("learner", "--learner.target-accuracy", "0.5", "--warmup.steps", "3")
    assert own == {"learner": {"target_accuracy": "0.5"}, "warmup": {"steps": "3"}}


def test_short_forms_say_where_a_learners_world_is(call):
    flags = ("--nproc", "8", "--nodes", "2", "--node-rank", "1", "--master", "head:29400")
    _, own, _ = call("learner", *flags, "--learner.world.restarts", "1")
    world = {"processes": 8, "nodes": 2, "node_rank": 1, "master": "head:29400", "restarts": "1"}
    assert own == {"learner": {"world": world}}


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("local --learner.stepps 3", "unknown option: --learner.stepps. Did you mean --learner.steps?"),
        ("lokal", 'unknown command "lokal". Did you mean "local"? --help lists all'),
        ("local sort", "unexpected argument 'sort': settings are given as --name VALUE"),
        ("local --preset", "--preset"),
        ("local --preset sotr", "no preset 'sotr': did you mean 'sort'?"),
        ("local --learner.steps many", "learner.steps: should be a valid integer"),
        ("local --learner.loss.type ppo_clp", "learner.loss.type: no 'ppo_clp': did you mean 'ppo_clip'?"),
        ("bus --port high", 'invalid value for --port: unable to convert "high" into int'),
        ("learner --learner.steps -1", "learner.steps: should be greater than or equal to 0"),
        ("learner --admission.max-staleness 1", "--admission.max-staleness is the run's, not this process's"),
        ("shards", "--shards requires an argument"),
        ("shards --shards 3-1", "'3-1' names no shards: write 2, or 0-3, or 0,2-3"),
        ("shards --shards 1 --replay.here 1", "--replay.here is the run's, not this process's"),
        ("storage --replay.shards 2 --replay.here 1-2", "there is no shard 2, shards=2"),
        ("actors --preset sort", "--preset is the run's, not this process's"),
        ("actors --actors.slots 1", "unknown option: --actors.slots"),
        ("actors --learner.steps=3", "--learner.steps is the run's, not this process's"),
        ("engines join foo", "foo is no URL of a server: write it as http://host:port"),
        ("soak --compressed --cluster 3", "--cluster 3: the bus of --compressed is one server"),
        ("soak --rolling 600 --cluster 3", "--cluster 3: the bus of --rolling is one server"),
        ("soak --rolling 600 --compressed", "--compressed and --rolling exclude each other: give one of"),
        ("soak --rolling 61 --minutes 1", "--rolling 61: it is the seconds between restarts, in 1 min"),
        ("bench actors --model qwen4", "no model 'qwen4' to measure with: there are tiny"),
    ],
)
def test_what_is_wrong_with_a_command_line_is_said(refused, command_line: str, message: str):
    assert message in refused(*command_line.split())


@pytest.mark.parametrize("command", ["local", "storage"])
def test_help_names_every_preset(helps: dict[str, str], command: str):
    presets = Path(cli.__file__).parents[1] / "presets"
    listed = " ".join(helps[command].partition("come with Sluice:")[2].partition(".")[0].split())
    names = [preset.stem for preset in presets.glob("*.toml")]
    assert names
    assert [name for name in names if name not in listed] == []


def test_another_type_in_a_file_replaces_the_table_of_a_preset_that_names_none(call, tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('[actors.environment]\ntype = "plugin"\nenvironment = "my_environment:Retries"\n')
    config = call("local", "--preset", "sort", "--config", str(file))[0]
    assert config.actors.environment.type == "plugin"


# --- settings that a process looks at ---


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Refuse a command line as a process would, which assembles its arguments itself; return the message."""
    monkeypatch.setattr(App, "assemble_argument_collection", ASSEMBLE)

    def process(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["launch", *arguments])
        with pytest.raises(SystemExit, match="2"):
            cli.main()
        return capsys.readouterr().err

    return process


def names_of(*arguments: str) -> set[str]:
    with cli.named_settings_alone(arguments):
        return {name for argument in ASSEMBLE(cli.app[arguments[0]]) for name in argument.names}


def test_a_process_looks_at_the_settings_of_the_named_sections_alone():
    every, some = names_of("local", "--help"), names_of("local", "--learner.steps", "4", "--seed=3")
    assert {"--learner.steps", "--learner.loss.type", "--seed", "--preset"} <= some
    assert "--actors.engine.type" in every - some
    assert names_of("local", "--no-such.thing", "1") < some < every == names_of("local", "-h")
    assert [command for command in cli.SETTINGS if "--run" not in names_of(command, "--run", "a")] == []


def test_a_process_names_the_nearest_of_all_settings(process):
    assert "Did you mean --actors.engine.type?" in process("local", "--actor.engine.type", "x")
    assert "it to the `launch storage` of the run" in process("learner", "--data.task", "sort")


def test_a_plan_with_prompts_that_are_not_there_is_refused(process):
    assert "none.jsonl: no such file" in process("plan", "--preset", "sort", "--prompts", "none.jsonl")


@pytest.mark.parametrize("command", [local, try_, plan, doctor])
def test_what_looks_at_a_run_before_it_starts_takes_the_short_forms_of_the_start(command):
    assert signature(command).parameters["given"].annotation is OfSettings
