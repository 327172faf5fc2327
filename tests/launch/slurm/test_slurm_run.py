"""A run on a real Slurm: nodes are lost, jobs requeued, actors come and go, and the run's end ends all."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from tests.launch.slurm.cluster import Cluster, cluster, wait_until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        any(shutil.which(name, path="/usr/sbin:/usr/bin") is None for name in ("slurmctld", "slurmd")),
        reason="no Slurm: apt-get install slurm-wlm",
    ),
]
START_S = 300.0
"""Longest time that a learner takes to start and to train a step."""
ENGINE_START_S = 600.0
"""The same for an actor with SGLang."""
SETTINGS = {
    "run": "tiny",
    "directory": "my runs",
    "learner": {
        "steps": 100_000, "target_accuracy": "none", "world": {"nodes": 2}, "checkpoint": {"save_every": 20},
    },
    "warmup": {"steps": 2},
    "admission": {"groups_per_step": 2},
    "evaluation": {"every_versions": 1000},
    "slurm": {
        "gpus_per_node": 0, "actors": 1, "look_s": 2, "options": ["--exclusive", "--comment=it's a \"test\""],
        "setup": ["export OMP_NUM_THREADS=1"],
    },
}  # fmt: skip
ENGINE_OF_NODES = SETTINGS | {
    "actors": {
        "engine": {
            "type": "sglang", "nodes": 2, "server": {"tp_size": 2}, "update": "tensor",
            "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        }
    },
    "learner": SETTINGS["learner"] | {"world": {"nodes": 1}},
}  # fmt: skip
RUN, ACTORS = "sluice-tiny", "sluice-tiny-actors"


class Run:
    """The run on a cluster, as its directory shows it."""

    def __init__(self, on: Cluster, directory: Path) -> None:
        self.on = on
        self.path = directory / "my runs" / "tiny"

    def steps(self) -> list[int]:
        """Return the steps of reinforcement learning in the order in which they were trained."""
        try:
            lines = (self.path / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        rows = [json.loads(line) for line in lines]
        return [row["step"] for row in rows if row.get("train/stage") == "rl"]

    def goes_on(self, within_s: float = START_S) -> float:
        """Wait for three further steps; return after how many seconds they came."""
        before = len(self.steps())
        return wait_until(lambda: len(self.steps()) >= before + 3, within_s)

    def actors(self) -> dict[str, str]:
        return self.on.jobs(ACTORS)

    def serves(self, actor: str) -> bool:
        """Return whether an actor's job has said that its engine has started."""
        said = self.path / "slurm" / f"actors-{actor}.out"
        return said.exists() and "answers_end_with" in said.read_text()


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """Return a run of `SETTINGS`, or of other settings and number of nodes that a test asks for."""
    settings, nodes = getattr(request, "param", (SETTINGS, 4))
    directory = tmp_path / 'it\'s a "run"'
    for path in (directory, tmp_path / "slurm"):
        path.mkdir()
    (directory / "run.toml").write_text(tomli_w.dumps(settings))
    with cluster(tmp_path / "slurm", nodes) as on:
        yield Run(on, directory)


def launch(run: Run, *arguments: str) -> str:
    program = str(Path(sys.executable).with_name("launch"))
    return run.on.ask(program, *arguments, directory=run.path.parents[1])


def test_a_run_outlives_lost_nodes_preemption_and_its_time_limit_and_ends_with_all_of_its_jobs(run: Run):
    times: dict[str, float] = {}
    launch(run, "slurm", "--preset", "sort", "--config", "run.toml", "--submit")
    [job] = run.on.jobs(RUN)
    times["submission to the third step"] = run.goes_on()

    # one more actor, whose node is lost
    run.on.ask("sbatch", "--array=1", str(run.path / "slurm" / "actors.sh"))
    wait_until(lambda: [*run.actors().values()] == ["RUNNING"] * 2, 60)
    first, second = sorted(run.actors(), key=run.on.node)
    run.on.lose(run.on.node(second))
    run.goes_on()
    wait_until(lambda: run.actors() == {first: "RUNNING", second: "PENDING"}, 120)
    run.on.start_node("n4")
    wait_until(lambda: run.actors()[second] == "RUNNING", 120)

    # the other one is preempted
    urgent = run.on.ask(
        "sbatch", "--parsable", "--partition=urgent", f"--nodelist={run.on.node(first)}", "--exclusive",
        "--output=/dev/null", "--wrap=sleep 1",
    )  # fmt: skip
    wait_until(lambda: run.actors()[first] == "PENDING", 120)
    wait_until(lambda: urgent not in run.on.ask("squeue", "--noheader", "--format=%i").split(), 120)
    wait_until(lambda: run.actors()[first] == "RUNNING", 120)

    # fewer actors
    run.on.ask("scancel", first)
    wait_until(lambda: run.actors() == {second: "RUNNING"}, 60)
    run.goes_on()

    # the learner's first node is lost, with bus and storage
    run.on.lose("n1")
    times["loss of the learner's node to its requeue"] = wait_until(
        lambda: run.on.jobs(RUN) == {job: "PENDING"}, 120
    )
    run.on.start_node("n1")
    times["that requeue to the third step"] = run.goes_on()

    # the time limit is near; meanwhile the run gets an end
    minutes = int(run.on.ask("squeue", "--noheader", f"--jobs={job}", "--format=%M").partition(":")[0])
    run.on.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 4}")
    times["time limit to requeue"] = wait_until(lambda: run.on.jobs(RUN) == {job: "PENDING"}, 240)
    run.on.ask("scontrol", "update", f"JobId={job}", "TimeLimit=1440")
    reached = run.steps()
    launch(run, "slurm", "--preset", "sort", "--config", "run.toml", "--learner.steps", str(reached[-1] + 5))
    times["requeue to the end of all jobs"] = wait_until(
        lambda: not run.on.ask("squeue", "--noheader"), START_S
    )
    assert run.steps()[len(reached) :] == list(range(reached[-1] + 1, reached[-1] + 6))
    shown = json.loads(launch(run, "runs", "show", "--run", "tiny", "--directory", "my runs", "--json"))
    assert shown["state"] == "finished"
    print(times)  # noqa: T201 - for the measurements


@pytest.mark.sglang
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", [(ENGINE_OF_NODES, 5)], indirect=True)
def test_engines_of_two_nodes_outlive_a_lost_node_and_come_and_go_as_one_job_each(run: Run):
    times: dict[str, float] = {}
    launch(run, "slurm", "--preset", "sort", "--config", "run.toml", "--submit")
    times["submission to the third step"] = run.goes_on(ENGINE_START_S)
    [engine] = run.actors()
    before = run.on.nodes(engine)
    assert before == ["n2", "n3"]

    # the engine's second node is lost, and the job begins again on two others
    run.on.lose("n3")
    times["loss of a node to the requeue"] = wait_until(lambda: run.on.nodes(engine) != before, 120)
    wait_until(lambda: len(run.on.nodes(engine)) == 2, 240)
    assert "n3" not in run.on.nodes(engine)
    times["from there to the third step"] = run.goes_on(ENGINE_START_S)

    # a second engine comes, and the first one goes
    run.on.start_node("n3")
    other = run.on.ask("sbatch", "--parsable", "--array=1", str(run.path / "slurm" / "actors.sh")) + "_1"
    wait_until(lambda: len(run.on.nodes(other)) == 2, 240)
    wait_until(lambda: run.serves(other), ENGINE_START_S)
    run.on.ask("scancel", engine)
    times["end of an engine's job"] = wait_until(lambda: run.actors() == {other: "RUNNING"}, 120)
    run.goes_on(ENGINE_START_S)

    # the time limits are near, and both jobs requeue themselves; the run gets an end meanwhile
    run.on.ask("scancel", "--batch", "--signal=USR1", other)
    times["signal to an engine's requeue"] = wait_until(lambda: run.actors() == {other: "PENDING"}, 120)
    steps = ("--learner.steps", str(run.steps()[-1] + 5))
    launch(run, "slurm", "--preset", "sort", "--config", "run.toml", *steps)
    [job] = run.on.jobs(RUN)
    run.on.ask("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: run.on.jobs(RUN) == {job: "PENDING"}, 120)
    times["requeue to the end of all jobs"] = wait_until(
        lambda: not run.on.ask("squeue", "--noheader"), ENGINE_START_S
    )
    shown = json.loads(launch(run, "runs", "show", "--run", "tiny", "--directory", "my runs", "--json"))
    assert shown["state"] == "finished"
    print(times)  # noqa: T201 - for the measurements
