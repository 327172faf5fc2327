"""`--print-config`: what it prints is the run's configuration again, and says where each value comes from."""

import json
from pathlib import Path

import pytest

from launch.cli import main as cli
from launch.cli.print_config import printed_toml
from launch.settings.run_config import RunConfig, config_file, preset, resolve
from launch.settings.sources import Origins, Source, leaves, merged
from launch.settings.tree import Model, may_be_none, members

RICH = {
    "run": 'quoted "name" \\ with\ttab',
    "data": {"sources": [{"name": "a", "prompts": "a.jsonl"}, {"name": "b", "prompts": "b.jsonl"}]},
    "learner": {"correction": {"type": "token_tis", "truncation_cap": "inf"}, "target_accuracy": None},
    "supervision": {"environment": {"learner": {"A.B": "1"}}},
    "model": {"freeze": ["a.*", "b"]},
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in ("SLUICE_BUS", "SLUICE_CREDS", "SLUICE_RUN", "SLUICE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture):
    """Return what a command line prints."""

    def printed(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert not ended.value.code
        return capsys.readouterr().out

    return printed


def origin(text: str, setting: str) -> str:
    """Return the comment after a setting of the top table."""
    [line] = [line for line in text.splitlines() if line.partition(" = ")[0] == setting]
    return line.rpartition("# ")[2]


@pytest.mark.parametrize("layer", [preset("sort"), preset("nim"), preset("panel"), RICH, {}])
def test_what_is_printed_is_the_configuration_again(layer: dict, tmp_path: Path):
    config = resolve(layer)
    (tmp_path / "printed.toml").write_text(printed_toml(config, [Source("preset", layer)]))
    again = config_file(tmp_path / "printed.toml")
    assert resolve(again) == config
    assert "url" not in again["bus"]  # else `launch local` would look for that one


def test_a_value_that_a_flag_takes_away_stays_away(printed, tmp_path: Path):
    flags = ("--learner.target-accuracy", "none")
    text = printed("local", "--preset", "sort", *flags, "--print-config")
    (tmp_path / "printed.toml").write_text(text)
    again = resolve(preset("sort"), config_file(tmp_path / "printed.toml"))
    assert preset("sort")["learner"]["target_accuracy"] is not None
    assert again.learner.target_accuracy is None


def test_the_origin_is_the_last_that_gave_the_value(printed, tmp_path: Path, monkeypatch):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("seed = 1\n[learner]\nsteps = 5\nthreads = 2\n")
    second.write_text("[learner]\nsteps = 6\n")
    monkeypatch.setenv("SLUICE_BUS", "nats://there:1")
    arguments = ("--preset", "sort", "--config", str(first), "--config", str(second), "--seed", "3")
    text = printed("storage", *arguments, "--reward", "contains", "--print-config")
    origins = {
        "run": "preset sort", "directory": "default", "seed": "flag", "steps": f"file {second}",
        "url": "environment SLUICE_BUS",
    }  # fmt: skip
    found = {name: origin(text.replace("[warmup]\nsteps", "").replace("steps = 400", ""), name)
             for name in ("run", "directory", "seed", "url")}  # fmt: skip
    assert found == {name: origins[name] for name in found}
    shown = json.loads(printed("storage", *arguments, "--reward", "contains", "--print-config", "--json"))
    assert shown["settings"]["learner"]["steps"] == 6
    assert shown["origins"]["learner.steps"] == f"file {second}"
    assert shown["origins"]["learner.threads"] == f"file {first}"
    assert shown["origins"]["actors.environment.reward"] == "flag --reward"
    assert shown["origins"]["warmup.steps"] == "preset sort"


def test_a_table_that_another_type_replaced_is_of_no_source_below():
    below = Source("preset", {"learner": {"loss": {"type": "ppo_clip", "clip_eps": 0.1}}})
    above = Source("flag", {"learner": {"loss": {"type": "cispo"}}})
    origins = Origins([below, above])
    assert origins.of(("learner", "loss", "type")) == "flag"
    assert origins.of(("learner", "loss", "clip_eps")) == "default"
    assert Origins([below]).of(("learner", "loss", "clip_eps")) == "preset"
    kept = Origins([below, Source("flag", {"learner": {"loss": {"clip_eps_high": 0.3}}})])
    assert kept.of(("learner", "loss", "clip_eps")) == "preset"


def test_what_a_choice_of_another_type_leaves_out_is_said_and_the_same_type_leaves_all():
    below = Source(
        "preset", {"learner": {"loss": {"type": "ppo_clip", "clip_eps": 0.1, "clip_eps_high": 0.2}}}
    )

    def replaced(loss: dict[str, object]) -> list[str]:
        return Origins([below, Source("flag", {"learner": {"loss": loss}})]).replaced

    assert replaced({"type": "gspo", "clip_eps_high": 0.1}) == [
        "learner.loss.type=gspo (flag) replaces ppo_clip, and leaves out learner.loss.clip_eps (preset)"
    ]
    assert replaced({"type": "ppo_clip"}) == replaced({"clip_eps": 0.3}) == []


def test_a_start_says_what_a_flag_of_another_type_leaves_out_of_the_preset(capsys):
    with pytest.raises(SystemExit):
        cli.main(
            ["local", "--preset", "search", "--actors.environment.type", "single_turn", "--print-config"]
        )
    said = capsys.readouterr().err
    assert "settings_left_out" in said
    assert "actors.environment.max_turns (preset search)" in said
    with pytest.raises(SystemExit):
        cli.main(["local", "--preset", "search", "--actors.environment.type", "tools", "--print-config"])
    shown = capsys.readouterr()
    assert "settings_left_out" not in shown.err
    assert "max_turns = 3                                 # preset search" in shown.out


def test_every_value_that_differs_from_the_default_has_an_origin():
    sources = [Source("preset", preset("nim")), Source("file", RICH)]
    config, defaults = resolve(merged(sources)), dict(leaves(RunConfig().model_dump(mode="json")))
    origins = Origins(sources)
    changed = [at for at, value in leaves(config.model_dump(mode="json")) if defaults.get(at, value) != value]
    assert len(changed) > 10
    assert [at for at in changed if origins.of(at) == "default"] == []


def test_what_the_papers_choose_is_printed_where_nothing_is_set(printed, tmp_path: Path):
    text = printed("local", "--learner.loss.type", "gspo", "--print-config")
    lines = text.splitlines()
    for table, here in (("correction", "none"), ("aggregation", "sequence_mean")):
        assert lines[lines.index(f"[learner.{table}]") + 1].endswith(f"# default; here {here}")
    flags = ("--learner.rejection.type", "second_moment")
    shown = json.loads(printed("local", *flags, "--print-config", "--json"))["chosen"]
    assert shown["learner.aggregation"] == {"type": "token_mean"}
    assert shown["learner.correction"]["truncation_cap"] == "Infinity"
    flags = ("--learner.loss.type", "gspo", "--learner.aggregation.type", "token_mean")
    text = printed("local", *flags, "--print-config")
    (tmp_path / "printed.toml").write_text(text)
    assert resolve(config_file(tmp_path / "printed.toml")).learner.used_aggregation.type == "token_mean"


def test_a_password_is_not_printed(printed):
    text = printed("storage", "--bus", "nats://me:hunter2@there:1", "--print-config")
    assert "hunter2" not in text
    [line] = [line for line in text.splitlines() if "nats://" in line]
    assert line.startswith('# url = "nats://***@there:1"')
    assert line.endswith("flag --bus; give it with its password in SLUICE_BUS")


def test_in_the_entries_of_a_table_no_value_is_the_default():
    """TOML leaves such a value out, so that the default comes back."""

    def missing(model: Model, inside: bool, path: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            several = inside or str(field.annotation).startswith(("tuple", "dict"))
            if inside and may_be_none(model, (name,)) and field.default is not None:
                found.append(f"{path}.{name}")
            for member in members(field.annotation):
                found += missing(member, several, f"{path}.{name}")
        return found

    assert missing(RunConfig, inside=False) == []


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--print-config", "--dry-run"), "--print-config and --dry-run exclude each other"),
        (("--json",), "--json is for --print-config: give both"),
        (("--print-config", "--seed", "x"), "seed: should be a valid integer"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["local", "--preset", "sort", *flags])
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
