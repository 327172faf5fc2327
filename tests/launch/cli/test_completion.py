"""The completion script, run by bash itself."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cli import main as cli
from launch.cli.completion_script import bash_script


@pytest.fixture(scope="module")
def script() -> str:
    return bash_script()


@pytest.fixture
def completed(script: str, tmp_path: Path) -> Callable[..., list[str]]:
    """Return what bash offers for the last of these words."""
    (tmp_path / "script.bash").write_text(script)
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/second").mkdir()

    def completed(*words: str, options: str = "") -> list[str]:
        typed = " ".join(map(shlex.quote, ("launch", *words)))
        ask = (
            f"{options}set -u; source script.bash; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; "
            'set +u; _launch; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", ask],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return completed


def test_commands_are_completed(completed):
    assert {*completed("")} == {name for name in cli.app if not name.startswith("-")}
    assert completed("st") == ["storage", "status"]
    assert completed("runs", "") == ["list", "show", "compare", "stop", "remove"]
    assert completed("runs", "s") == ["show", "stop"]


def test_flags_are_completed_by_section(completed):
    assert completed("local", "--pre") == ["--preset"]
    assert completed("local", "--lear") == ["--learner."]
    assert completed("local", "--learner.lo") == ["--learner.loss."]
    assert {"--learner.loss.type", "--learner.loss.clip-eps"} < {*completed("local", "--learner.loss.")}
    assert completed("local", "--seed", "3", "--data.no-sh") == ["--data.no-shuffle"]
    assert completed("runs", "stop", "--t") == ["--timeout-s"]
    assert completed("bus", "--monitoring.po") == ["--monitoring.port"]


def test_flags_of_other_processes_are_not_offered(completed):
    assert completed("actors", "--lear") == []
    assert "--learner." in completed("learner", "--")


def test_values_are_completed(completed):
    assert completed("local", "--preset", "s") == ["sort"]
    assert completed("local", "--learner.loss.type", "c") == ["cispo", "clip_cov"]
    assert completed("local", "--learner.loss.type", "=", "cis") == ["cispo"]
    assert completed("local", "--learner.loss.type", "=") == completed("local", "--learner.loss.type", "")
    assert completed("runs", "show", "--run", "") == ["first", "second"]
    assert completed("local", "--log-format", "") == ["text", "json"]
    assert completed("local", "--config", "") == []  # bash offers files


@pytest.mark.parametrize("options", ["", "shopt -s nullglob; ", "shopt -s failglob; "])
def test_names_of_directories_are_never_executed(options: str, completed, tmp_path: Path):
    hostile = ("$(touch ran)", "`touch ran`", "a;touch ran", "$HOME", "two words", "*", "a[$(touch ran)]")
    for name in hostile:
        (tmp_path / "runs" / name).mkdir()
    (tmp_path / "runs/file").touch()
    for prefix in ("", "f", "$", "`"):
        offered = completed("runs", "show", "--run", prefix, options=options)
        assert offered == [name for name in ("first", "second") if name.startswith(prefix)]
    assert not [*tmp_path.rglob("ran")]


@pytest.mark.parametrize("options", ["", "shopt -s nullglob; ", "shopt -s failglob; "])
def test_without_a_run_no_name_is_offered(options: str, completed, tmp_path: Path):
    for name in ("first", "second"):
        (tmp_path / "runs" / name).rmdir()
    assert completed("runs", "show", "--run", "", options=options) == []
    (tmp_path / "runs").rmdir()
    assert completed("runs", "show", "--run", "", options=options) == []


def test_every_command_and_each_of_its_flags_are_in_the_script(script: str):
    for command in ("bench staleness", "doctor", "runs compare", "engines join", "gateway", "convert"):
        assert f"\n  ['{command}']='" in script
    assert len(script) < 250_000


def test_the_command_prints_the_script(script: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", "bash"])
    assert not ended.value.code
    assert capsys.readouterr().out == script + "\n"


def test_another_shell_is_refused(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["completion", "csh"])
    assert 'Choose from: "bash"' in capsys.readouterr().err
