"""`launch slurm`: what it writes for sbatch, what it refuses, and what the written jobs do; without Slurm."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from launch.cli import main as cli

SETTINGS = """
run = "mine"
directory = "my runs"
[learner]
world = { nodes = 2, processes = 8 }
parallel = { tensor = 8 }
[slurm]
partition = "a100"
account = "lab"
actors = 4
options = ["--exclusive", "--comment=it's \\"mine\\""]
actor_options = ["--partition=spot"]
setup = ["module load 'cuda 12'"]
"""
SHARED = [
    "--partition=a100", "--account=lab", "--gpus-per-node=8", "--ntasks-per-node=1", "--time=1440",
    "--signal=B:USR1@300", "--requeue", "--open-mode=append",
]  # fmt: skip
ENGINE = (
    "--actors.engine.type", "sglang", "--actors.engine.nodes", "2", "--actors.engine.server.tp-size", "16",
    "--actors.engine.update", "tensor",
)  # fmt: skip
"""An engine of two nodes."""
OWN = ["--exclusive", '--comment=it\'s "mine"']


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, whose name has what a shell treats in its own way."""
    directory = tmp_path / 'it\'s a "run" $HOME'
    directory.mkdir()
    monkeypatch.chdir(directory)
    (directory / "mine.toml").write_text(SETTINGS)
    return directory


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts programs of these names and texts first in PATH."""
    directory = tmp_path / "programs"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")

    def put(**texts: str) -> None:
        for name, text in texts.items():
            (directory / name).write_text(f"#!/bin/bash\n{text}\n")
            (directory / name).chmod(0o755)

    return put


def write(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["slurm", "--config", "mine.toml", *arguments])
    assert not ended.value.code


def options(script: Path) -> list[str]:
    lines = re.findall(r"^#SBATCH (.*)", script.read_text(), re.MULTILINE)
    return [word for line in lines for word in shlex.split(line)]


def refusal(*arguments: str, capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["slurm", "--config", "mine.toml", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_scripts_ask_for_what_the_settings_say(here: Path):
    write("--data.prompts", "p.jsonl")
    files = here / "my runs" / "mine" / "slurm"
    assert options(files / "run.sh") == [
        "--job-name=sluice-mine", *SHARED, f"--chdir={here}", "--nodes=2", f"--output={files}/run-%j.out",
        "--dependency=singleton", *OWN,
    ]  # fmt: skip
    assert options(files / "actors.sh") == [
        "--job-name=sluice-mine-actors", *SHARED, f"--chdir={here}", "--nodes=1",
        f"--output={files}/actors-%A_%a.out", "--array=0-3", *OWN, "--partition=spot",
    ]  # fmt: skip
    for script in ("run.sh", "actors.sh"):
        assert subprocess.run(["bash", "-n", files / script], capture_output=True).stderr == b""
        setup, _, rest = (files / script).read_text().partition("\nmodule load 'cuda 12'\n")
        began = f"{setup}\necho $MISSING begun\n{rest.partition('launch=')[0]}\n$MISSING"
        said = subprocess.run(["bash", "-c", began], capture_output=True, text=True)
        assert said.stdout == "begun\n", "lines of the setup may read what is not set"
        assert "unbound variable" in said.stderr
    assert 'prompts = "p.jsonl"' in (files / "settings.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--learner.world.nodes", "1", "--learner.parallel.pipeline", "2"), "learner.world.nodes=1"),
        (("--slurm.gpus-per-node", "4"), "slurm.gpus_per_node=4: set both alike"),
        (("--slurm.time-limit-min", "10"), "time_limit_min=10 leaves little before signal_s=300"),
        (("--slurm.options", "exclusive"), "'exclusive' is no option of sbatch"),
        (("--slurm.actors", "0"), "slurm.actors"),
        ((*ENGINE, "--actors.engine.server.tp-size", "32"), "16 ranks on a node, and slurm.gpus_per_node=8"),
        ((*ENGINE, "--actors.engine.rendezvous", "h:1"), "each job of the array has an address of its own"),
        (("--colocation.enabled", "--learner.world.nodes", "1"), "set it to false"),
        (("--bus.url", "nats://me:secret@h:1"), "bus.url=nats://***@h:1: `launch slurm` starts its own bus"),
        (("--directory", "100%"), "choose another --directory"),
        (("--submit",), "--submit needs sbatch, which is not installed here"),
    ],
)
def test_settings_with_which_no_job_could_run_are_refused(
    arguments: tuple[str, ...], why: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("PATH", str(here))
    assert why in refusal(*arguments, capsys=capsys)
    assert not (here / "my runs").exists()


def test_a_submission_is_refused_with_what_the_cluster_says(
    here: Path, programs: Callable[..., None], capsys
):
    programs(sinfo="echo a1000; echo spot", sbatch="exit 1", squeue="", scancel='echo "$@" >> cancelled')
    assert "no partition 'a100': did you mean 'a1000'? there are: a1000, spot" in refusal(
        "--submit", capsys=capsys
    )
    programs(sinfo="echo a100", squeue="echo 12; echo 13_0")
    assert "12, 13_0; end them with `scancel --me --name=sluice-mine,sluice-mine-actors`" in refusal(
        "--submit", capsys=capsys
    )
    programs(
        squeue="",
        sbatch='[[ $* == *run.sh ]] && echo "12;cluster" || { echo "Invalid account" >&2; exit 1; }',
    )
    assert "Invalid account: change the settings of the section slurm" in refusal("--submit", capsys=capsys)
    assert (here / "cancelled").read_text() == "12\n"


LAUNCH = """\
import os, re, signal, socket, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
def shell_traps():
    caught = re.search(r"SigCgt:\\s*(\\w+)", open(f"/proc/{os.getppid()}/status").read())
    return int(caught[1], 16) >> signal.SIGUSR1 - 1 & 1
while not {"learner", "--actors.engine.node-rank"}.isdisjoint(sys.argv) and not shell_traps():
    pass
with open("record", "a") as record:
    print(os.getpid(), *sys.argv[1:], sep="\\t", file=record)
if sys.argv[1] == "bus":
    if "EARLY" in os.environ:
        os.kill(os.getppid(), signal.SIGUSR2)
    listening = socket.create_server(("", int(sys.argv[sys.argv.index("--port") + 1])))
if sys.argv[1] == "storage":
    time.sleep(0.5)  # it opens its prompts meanwhile, and the bus has the settings of an earlier start
    assert "\\tlearner\\t" not in open("record").read()
    open("my runs/mine/config.json", "w").write("{}")
if sys.argv[1] == "runs":
    print(os.environ["SHOWN"])
elif sys.argv[1] == "learner" and "STATUS" in os.environ:
    sys.exit(int(os.environ["STATUS"]))
else:
    signal.sigwait([signal.SIGTERM])
    open("drained", "a").write(sys.argv[1] + " ")
"""
"""Stands for `launch`: writes down how it was called, and that it was told to end."""
JOB = str(os.getpid())
"""Number of the job, from which it takes its ports."""
ACTOR = "7_1"
"""The same of an actor's, in its array."""
END_ACTORS = "scancel --quiet --user=me --name=sluice-mine-actors"
SRUN = """\
while [[ $1 == --* ]]; do shift; done
until [[ $4 == actor ]] || grep -q storage record; do :; done
echo $$ > step
exec "$@"
"""
SCANCEL = """\
echo scancel "$@" > then
step=$(< step)
if [[ $1 == --signal=* ]]; then kill "-${1#--signal=}" $(< /proc/$step/task/$step/children) $step; fi
"""
"""Signals every process of the step, as Slurm does."""


class Job:
    """A script that runs with stand-ins for `launch` and for Slurm's programs."""

    def __init__(self, here: Path, script: str, **variables: str) -> None:
        self.here = here
        path = here / "my runs" / "mine" / "slurm" / script
        lines = path.read_text().replace("module load 'cuda 12'", "").splitlines()
        launch = f"launch=({shlex.join([sys.executable, '-c', LAUNCH])})"
        path.write_text("\n".join(launch if line.startswith("launch=") else line for line in lines))
        array, task = ACTOR.split("_")
        given = {
            "SLURM_JOB_ID": JOB, "SLURM_NODEID": "0", "SLURM_JOB_USER": "me",
            "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task, **variables,
        }  # fmt: skip
        self.process = subprocess.Popen(["bash", path], env={**os.environ, **given}, start_new_session=True)

    def started(self) -> list[list[str]]:
        """Return process id and arguments of each `launch`."""
        record = self.here / "record"
        return [line.split("\t") for line in record.read_text().splitlines()] if record.exists() else []

    def wait_for(self, count: int) -> list[list[str]]:
        deadline = time.monotonic() + 60
        while len(found := self.started()) < count:
            assert time.monotonic() < deadline, found
            assert self.process.poll() is None
            time.sleep(0.01)
        return found


@pytest.fixture
def job(here: Path, programs: Callable[..., None]) -> Iterator[Callable[..., Job]]:
    """Return a function that runs a written script; what is left of it is killed."""
    write("--slurm.look-s", "1")
    (here / "my runs" / "mine" / "config.json").write_text("{}")  # of an earlier start
    programs(
        sleep="exec /bin/sleep 0.05", srun=SRUN, scancel=SCANCEL, squeue="cat jobs",
        scontrol='echo scontrol "$@" > then',
    )  # fmt: skip
    jobs: list[Job] = []

    def start(script: str, **variables: str) -> Job:
        jobs.append(Job(here, script, **variables))
        return jobs[-1]

    yield start
    for one in jobs:
        with suppress(ProcessLookupError):  # it ended, and what it started as well
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait(60)


@pytest.mark.parametrize(
    ("status", "state", "then"),
    [("0", "finished", END_ACTORS), ("0", "stopped", "scontrol requeue {}"), ("1", "failed", END_ACTORS)],
)
def test_the_job_starts_each_process_and_ends_as_the_learner_does(
    status: str, state: str, then: str, here: Path, job: Callable[..., Job]
):
    running = job("run.sh", STATUS=status, SHOWN=f'{{"run": "mine", "state": "{state}"}}')
    assert running.process.wait(60) == int(status)
    started = [words[1:] for words in running.started()]
    assert [words[0] for words in started] == ["bus", "storage", "learner", "runs"]
    for words in started:
        cli.app.parse_args(words, exit_on_error=False, print_error=False)
    assert (here / "then").read_text().strip() == then.format(JOB)


@pytest.mark.parametrize(
    ("number", "then"),
    [(signal.SIGUSR1, f"scontrol requeue {JOB}\n"), (signal.SIGUSR2, f"scancel --signal=USR1 {JOB}\n")],
)
def test_a_signal_ends_the_learner_and_the_job_which_requeues_itself_before_the_time_limit(
    number: int, then: str, here: Path, job: Callable[..., Job]
):
    running = job("run.sh", SHOWN='{"state": "stopped"}')
    running.wait_for(3)
    running.process.send_signal(number)
    assert running.process.wait(60) == 0
    assert (here / "drained").read_text() == "learner storage bus "
    assert (here / "then").read_text() == then


def test_a_job_that_is_ended_before_its_learner_begins_starts_none(here: Path, job: Callable[..., Job]):
    running = job("run.sh", EARLY="yes")
    assert running.process.wait(60) == 0
    assert "bus" in (here / "drained").read_text()
    assert "learner" not in [words[1] for words in running.started()]


def test_an_actor_follows_the_bus_and_ends_with_the_job_of_the_learner(here: Path, job: Callable[..., Job]):
    address = here / "my runs" / "mine" / "slurm" / "bus"
    (here / "jobs").write_text("7")
    running = job("actors.sh")
    for count, bus in enumerate(("nats://a:1", "nats://b:2"), start=1):
        address.write_text(bus)
        *_, (pid, *words) = running.wait_for(count)
        assert words[:3] == ["actors", "--bus", bus]
        cli.app.parse_args(words, exit_on_error=False, print_error=False)
    os.kill(int(pid), signal.SIGKILL)
    running.wait_for(3)
    (here / "jobs").write_text("")
    assert running.process.wait(60) == 0
    assert (here / "drained").read_text() == "actors actors "
    assert not (here / "then").exists()


@pytest.mark.parametrize(
    ("number", "engine", "then"),
    [
        (signal.SIGUSR1, (), f"scontrol requeue {ACTOR}\n"),
        (signal.SIGUSR1, ENGINE, f"scancel --signal=USR1 {ACTOR}\nscontrol requeue {ACTOR}\n"),
        (signal.SIGUSR2, ENGINE, f"scancel --signal=USR1 {ACTOR}\n"),
    ],
)
def test_a_signal_ends_an_actor_and_its_job_which_requeues_itself_before_the_time_limit(
    number: int, engine: tuple[str, ...], then: str,
    here: Path, job: Callable[..., Job], programs: Callable[..., None],
):  # fmt: skip
    write("--slurm.look-s", "1", *engine)
    programs(scancel=SCANCEL.replace("> then", ">> then"), scontrol='echo scontrol "$@" >> then')
    (here / "jobs").write_text("7")
    (here / "my runs" / "mine" / "slurm" / "bus").write_text("nats://a:1")
    assert f"--nodes={2 if engine else 1}" in options(here / "my runs" / "mine" / "slurm" / "actors.sh")
    running = job("actors.sh", SLURM_NODEID="1")
    [[_, *words]] = running.wait_for(1)
    cli.app.parse_args(words, exit_on_error=False, print_error=False)
    own = dict(pairwise(words))
    assert own.get("--actors.engine.node-rank") == ("1" if engine else None)
    assert ("--actors.engine.rendezvous" in own) == bool(engine)
    running.process.send_signal(number)
    assert running.process.wait(60) == 0
    assert (here / "drained").read_text() == "actors "
    assert (here / "then").read_text() == then
