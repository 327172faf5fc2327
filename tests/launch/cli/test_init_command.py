"""`launch init`: the file that it writes changes nothing, and any of its lines may be changed."""

import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from launch.cli import main as cli
from launch.settings.run_config import RunConfig, config_file, flags, preset, resolve, validate
from launch.settings.sources import leaves

SETTING = re.compile(r"^#?([a-z_]+(?:\.[a-z_0-9]+)*) = (.*)$")
PRESETS = sorted(path.stem for path in (Path(cli.__file__).parents[1] / "presets").glob("*.toml"))


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Return the path of the file that `launch init` writes with these flags."""

    def written(*arguments: str) -> Path:
        path = tmp_path / "mine.toml"
        with pytest.raises(SystemExit) as ended:
            cli.main(["init", str(path), *arguments])
        assert not ended.value.code
        assert capsys.readouterr().out == f"wrote {path}: edit it, then `launch local --config {path}`\n"
        return path

    return written


def settings(path: Path) -> dict[str, str]:
    """Return each line with a setting, by its name, without the comment sign."""
    found = [SETTING.match(line) for line in path.read_text().splitlines()]
    return {match[1]: match[0].removeprefix("#") for match in found if match}


@pytest.mark.parametrize("flag", [(), ("--all",)])
def test_the_file_as_it_is_gives_the_defaults(flag: tuple[str, ...], written):
    path = written(*flag)
    assert config_file(path) == {}
    assert validate(config_file(path)) == RunConfig()


def test_with_every_default_in_force_nothing_changes_either(written):
    lines = settings(written("--all"))
    defaults = {".".join(at): value for at, value in leaves(RunConfig().model_dump(mode="json"))}
    tables_of_tables = {
        "data.sources", "learner.teachers", "evaluation.sets", "actors.environments", "actors.opponents",
        "actors.evaluation.endpoints", "policies",
    }  # fmt: skip
    assert {*defaults} - {*lines} == tables_of_tables
    every = flags(tomllib.loads("\n".join(lines[name] for name in defaults if name in lines)))
    assert validate(every) == RunConfig()


def test_each_line_may_come_into_force_alone(written):
    lines = settings(written())
    assert {"learner.steps", "data.prompts", "model.path", "actors.environment.reward"} < {*lines}
    for line in lines.values():
        assert validate(flags(tomllib.loads(line))) == RunConfig()


def test_settings_of_another_type_are_taken_with_it(written):
    lines = settings(written("--all"))
    chosen = lines["learner.loss.type"].replace("reinforce", "cispo")
    taken = tomllib.loads("\n".join([chosen, lines["learner.loss.highest_weight"]]))
    assert validate(taken).learner.loss.highest_weight == 5.0


def test_every_setting_is_under_its_explanation(written):
    lines = written("--all").read_text().splitlines()
    bare = [
        line for above, line in pairwise(lines)
        if SETTING.match(line) and not re.match(r"# \S", above)
    ]  # fmt: skip
    assert bare == []
    assert "Undefined" not in "".join(lines)
    assert max(len(line) for line in lines if line.startswith("# ") and "/mine.toml" not in line) <= 100


def test_settings_that_most_runs_set_come_first(written):
    names = list(settings(written("--all")))
    assert names[:5] == ["run", "directory", "seed", "data.prompts", "model.path"]
    assert names.index("learner.steps") < names.index("bus.url")
    assert len(names) == len({*names})


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("flag", [(), pytest.param(("--all",), marks=pytest.mark.nightly)])
def test_a_preset_is_in_force(name: str, flag: tuple[str, ...], written):
    path = written("--preset", name, *flag)
    assert resolve(config_file(path)) == resolve(preset(name))


def test_a_file_that_exists_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "mine.toml"
    path.write_text("seed = 1")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["init", str(path)])
    assert f"{path} exists already, and is left as it is: name another file" in capsys.readouterr().err
    assert path.read_text() == "seed = 1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.json", "mine.json would be read as JSON or not at all: give it a name that ends with .toml"),
        ("missing/mine.toml", "cannot write missing/mine.toml: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(name: str, message: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["init", name])
    assert message in capsys.readouterr().err


def test_a_minus_sign_writes_to_the_terminal(capsys: pytest.CaptureFixture, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["init", "-"])
    assert capsys.readouterr().out.startswith("# Settings of a run: `launch local --config sluice.toml`")
    assert list(tmp_path.iterdir()) == []
