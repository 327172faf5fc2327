"""The completion scripts, run by their shells themselves."""

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cli import main as cli
from launch.cli.completion_script import script as script_of


@pytest.fixture(scope="module")
def script() -> str:
    return script_of("bash")


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
    assert sorted(completed("st")) == ["status", "storage"]
    assert completed("runs", "") == ["list", "show", "compare", "note", "stop", "remove"]
    assert completed("runs", "s") == ["show", "stop"]


def test_flags_are_completed_by_section(completed):
    assert completed("local", "--pre") == ["--preset"]
    assert completed("local", "--lear") == ["--learner."]
    assert completed("local", "--learner.los") == ["--learner.loss."]
    assert {"--learner.loss.type", "--learner.loss.clip-eps"} < {*completed("local", "--learner.loss.")}
    assert completed("local", "--seed", "3", "--data.no-sh") == ["--data.no-shuffle"]
    assert completed("runs", "stop", "--t") == ["--timeout-s"]
    assert completed("bus", "--monitoring.po") == ["--monitoring.port"]


def test_flags_of_other_processes_are_not_offered(completed):
    assert completed("actors", "--lear") == []
    assert "--learner." in completed("learner", "--")


def test_values_are_completed(completed):
    assert completed("local", "--preset", "so") == ["sort"]
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


ASKED = [
    (["st"], ["status", "storage"]),
    (["runs", "s"], ["show", "stop"]),
    (["local", "--pre"], ["--preset"]),
    (["local", "--lear"], ["--learner."]),
    (["local", "--learner.los"], ["--learner.loss."]),
    (["local", "--seed", "3", "--data.no-sh"], ["--data.no-shuffle"]),
    (["local", "--preset", "so"], ["sort"]),
    (["local", "--learner.loss.type", "c"], ["cispo", "clip_cov"]),
    (["runs", "show", "--run", ""], ["first", "second"]),
    (["actors", "--lear"], []),
]


@pytest.fixture
def beside_runs(tmp_path: Path) -> Path:
    """A directory with runs, one of which has a name that a shell could execute."""
    for name in ("first", "second", "$(touch ran)"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    return tmp_path


def asked(program: list[str], directory: Path) -> list[str]:
    done = subprocess.run(program, cwd=directory, capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    assert not [*directory.rglob("ran")]
    return sorted(done.stdout.splitlines())


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish: apt-get install fish")
@pytest.mark.parametrize(("words", "offered"), [*ASKED, (["local", "--preset=so"], ["--preset=sort"])])
def test_fish_offers_the_same(words: list[str], offered: list[str], beside_runs: Path):
    (beside_runs / "launch.fish").write_text(script_of("fish"))
    typed = " ".join(["launch", *words])
    asks = f"source launch.fish; complete -C '{typed}'"
    assert asked(["fish", "--no-config", "-c", asks], beside_runs) == offered


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh: apt-get install zsh")
@pytest.mark.parametrize(("words", "offered"), ASKED)
def test_zsh_offers_the_same(words: list[str], offered: list[str], beside_runs: Path):
    """The function is called as zsh calls it, with the words typed so far; what it offers is printed."""
    (beside_runs / "_launch").write_text(script_of("zsh"))
    typed = " ".join(f"'{word}'" for word in ("launch", *words))
    asks = (
        "compdef() { }; compadd() { while [[ $1 != -- ]]; do shift; done; shift; "
        'for one; do [[ $one == ${PREFIX}* ]] && print -r -- "$one"; done }; _files() { }; '
        f"source ./_launch; words=({typed}); CURRENT={len(words) + 1}; PREFIX='{words[-1]}'; _launch; true"
    )
    assert asked(["zsh", "-f", "-c", asks], beside_runs) == offered


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh: apt-get install zsh")
def test_zsh_completes_what_is_typed_at_its_prompt(beside_runs: Path):
    (beside_runs / "_launch").write_text(script_of("zsh"))
    (beside_runs / "setup").write_text(r"""
fpath=($PWD $fpath)
autoload -Uz compinit
compinit -u -d dump
launch-typed() { print -r -- "typed <$BUFFER>" }
zle -N launch-typed
bindkey "^I" complete-word
bindkey "^G" launch-typed
""")
    asks = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'source ./setup'
for typed in 'launch runs sto' 'launch local --preset=so' 'launch local --learner.los'; do
  zpty -w -n shell "$typed"$'\t'$'\a'
  zpty -r -m shell found '*typed <*>*'
  print -r -- ${${found##*typed <}%%>*}
  zpty -w -n shell $'\C-u'
done
zpty -d shell
"""
    found = asked(["timeout", "25", "zsh", "-f", "-c", asks], beside_runs)
    assert [one.rstrip() for one in found] == [
        "launch local --learner.loss.",
        "launch local --preset=sort",
        "launch runs stop",
    ]


def test_every_command_and_each_of_its_flags_are_in_the_script(script: str):
    for command in ("bench staleness", "doctor", "runs compare", "engines join", "gateway", "convert"):
        assert f"\n  ['{command}']='" in script
    assert len(script) < 400_000  # seven commands take all settings of a run


def test_the_command_prints_the_script(script: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", "bash"])
    assert not ended.value.code
    assert capsys.readouterr().out == script + "\n"


def test_another_shell_is_refused(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["completion", "csh"])
    assert 'Choose from: "bash", "zsh", "fish"' in capsys.readouterr().err
