"""The tutorials' files and commands do what they say, in a directory of their own."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bus.server.nats_server import free_port
from launch.cli import main as cli
from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory
from tests.e2e.commands import Command, wait_until

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
FILE = re.compile(r"^```(?:python|toml)\n# (\S+\.(?:py|toml))\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FEW_STEPS = (
    "--learner.steps", "2", "--admission.groups-per-step", "2", "--admission.samples-per-prompt", "4",
    "--admission.max-staleness", "1", "--evaluation.every-versions", "0",
)  # fmt: skip
"""Settings that a whole run gets instead of the tutorial's number of steps."""
NOT_RUN = {"dashboard", "doctor", "try"}
"""Commands that serve until they are stopped, look at the GPUs of a host, or want an earlier run's model."""


def console(page: str) -> Iterator[str]:
    """Each command of a tutorial."""
    for block in CONSOLE.findall((TUTORIALS / f"{page}.md").read_text()):
        yield from (line for line in block.replace("\\\n", " ").splitlines() if not line.startswith("# "))


def launches(page: str) -> list[list[str]]:
    """The arguments of each `launch` command of a tutorial."""
    commands = (shlex.split(command) for command in console(page) if command.startswith("launch "))
    return [words[1:] for words in commands]


def with_few_steps(words: list[str]) -> list[str]:
    """The arguments of a run, with two steps of few prompts."""
    given = dict(zip(FEW_STEPS[::2], FEW_STEPS[1::2], strict=True))
    repeated = {n + i for n, word in enumerate(words) if word in given for i in range(2)}
    return [*(word for n, word in enumerate(words) if n not in repeated), *FEW_STEPS]


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes the files of a tutorial in a working directory, as its reader does."""

    def prepare(page: str) -> Path:
        for name, text in FILE.findall((TUTORIALS / f"{page}.md").read_text()):
            (tmp_path / name).write_text(text)
        for command in console(page):
            if not command.startswith("launch "):
                subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return prepare


def starts(page: str) -> list[list[str]]:
    """The commands of a tutorial that start a run on this machine, without those that only look."""
    return [words for words in launches(page) if words[0] == "local" and "--dry-run" not in words]


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("page", ["own-reward", "own-environment", "own-agent", "eight-gpus", "coming-from"])
def test_the_runs_of_a_tutorial_may_start(page: str, beside, monkeypatch, capsys: pytest.CaptureFixture):
    directory = beside(page)
    sizes = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, context=8192)
    build_model_directory(directory / "Qwen3-8B", sizes, seed=0)
    (directory / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1", "label": "2"}) + "\n")
    assert starts(page)
    monkeypatch.setattr("launch.checks.start_checks.refuse_no_sglang", lambda config: None)  # not here
    for words in starts(page):
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, "--dry-run"])
        said = capsys.readouterr()
        assert ended.value.code in (None, 0), said.err
        assert "may start" in said.out


@pytest.mark.nightly
@pytest.mark.nats
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ["own-reward", "own-environment", "own-agent", "eight-gpus", "coming-from"])
def test_the_commands_of_a_tutorial_run(page: str, beside):
    directory = beside(page)
    ran = []
    for words in launches(page):
        if words[0] in NOT_RUN or "eight.toml" in words:
            continue
        ran.append(Command(directory, *(with_few_steps(words) if words[0] == "local" else words)))
        try:
            assert ran[-1].wait(400) == 0, ran[-1].said()
        finally:
            ran[-1].kill()
    [run] = (directory / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["accounted"]) == (2, True)


@pytest.mark.nightly
@pytest.mark.nats
@pytest.mark.timeout(900)
def test_the_hosts_of_the_tutorial_train_together(beside):
    directory, port = beside("two-hosts"), free_port("127.0.0.1")
    running: dict[str, Command] = {}
    try:
        for command in console("two-hosts"):
            here = command.replace("4222", str(port)).replace("--host a", "--host 127.0.0.1")
            words = shlex.split(here)[1:]
            if words[0] == "status":
                wait_until(lambda: "step" in running["learner"].said(), "the learner", running["learner"])
            if words[0] == "storage":
                words = [*with_few_steps(words), "--warmup.steps", "2"]
            running[words[0]] = Command(directory, *words)
            if words[0] == "bus":
                wait_until(lambda: "bus_ready" in running["bus"].said(), "the bus", running["bus"])
        for name in ("learner", "actors"):
            assert running[name].wait(400) == 0, running[name].said()
        assert running["status"].wait(60) in (0, 1), running["status"].said()  # 1: something is missing yet
        assert running["storage"].stop() == 0, running["storage"].said()
    finally:
        for command in running.values():
            command.kill()
    summary = json.loads((directory / "runs/two/summary.json").read_text())
    assert summary["steps"] == 2
