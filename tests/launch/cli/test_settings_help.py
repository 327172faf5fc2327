"""Help for settings: short by default, and one section in full on request."""

from contextlib import suppress
from itertools import pairwise

import pytest
from rich.console import Console

from bus.config import Config
from launch.cli import main as cli
from launch.cli.app import app
from launch.cli.settings_help import COMMON, setting_at
from launch.settings.tree import describe

TWO_SCREENS = 80
"""Lines of two screens of 40."""


class Below(Config):
    deep: int = 0
    """Deep down."""


class Parent(Config):
    inherited: int = 0
    """What the parent says."""

    changed: int = 0
    """What the parent says."""


class Child(Parent):
    changed: int = 1
    """What the child says,
    in two lines."""

    tables: tuple[Below, ...] = ()
    silent: int = 0


def test_settings_are_described_by_the_docstrings_under_them_and_only_when_asked():
    fields = {**Child.model_fields, **Below.model_fields}
    assert [field.description for field in fields.values()] == [None] * 5  # no start parses their source
    describe(Child)
    assert {name: field.description for name, field in fields.items()} == {
        "inherited": "What the parent says.",
        "changed": "What the child says,\nin two lines.",
        "tables": None,
        "silent": None,
        "deep": "Deep down.",
    }


@pytest.fixture
def shown(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Return what a command line prints on a terminal of so many columns."""

    def shown(*arguments: str, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(app, "_console", Console())  # the app keeps the width of its first use
        with suppress(SystemExit):  # a refusal leaves nothing on stdout, which each test looks at
            cli.main(arguments)
        return capsys.readouterr().out

    return shown


@pytest.mark.parametrize("command", ["local", "storage", "learner", "actors"])
def test_help_fits_two_screens(shown, command: str):
    lines = shown(command, "--help").splitlines()
    assert 15 < len(lines) <= TWO_SCREENS
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", ["gateway", "doctor", "status"])
def test_a_paragraph_is_broken_by_the_width_of_the_terminal_alone(shown, command: str):
    before, _, _ = shown(command, "--help").partition("╭")
    for paragraph in before.split("\n\n"):
        lines = paragraph.splitlines()
        for line, following in pairwise(lines):
            assert len(line.rstrip()) + len(following.partition(" ")[0]) >= 79, paragraph


def test_the_list_of_commands_fits_two_screens_and_groups_them_all(shown):
    lines = shown("--help").splitlines()
    assert len(lines) <= TWO_SCREENS
    text = "\n".join(lines)
    headings = [text.index(f"─ {heading} ─") for heading in cli.GROUPS]
    assert headings == sorted(headings)
    assert "─ Commands ─" not in text  # where one without a group would be
    grouped = {name for names in cli.GROUPS.values() for name in names}
    assert grouped == {name for name in app if not name.startswith("-")}
    assert "SLUICE_BUS" in text
    assert "SLUICE_BUS" not in shown("runs", "list", "--help")


def test_settings_that_most_runs_set_come_before_the_sections(shown):
    text = shown("local", "--help", columns=100)
    assert 0 < text.index("--learner.steps") < text.index("Sections, ")
    assert "Objective of each token. [reinforce]" in text


def test_every_common_setting_exists():
    assert all(setting_at(key) for keys in COMMON.values() for key in keys if not key.endswith(".type"))


def test_a_section_shows_each_kind_with_its_own_settings(shown):
    text = shown("local", "--help", "learner.loss", columns=100)
    clip, cispo = text.index("type ppo_clip"), text.index("type cispo")
    assert (
        clip < text.index("--learner.loss.dual-clip FLOAT|none") < cispo < text.index("highest-weight FLOAT")
    )
    assert "--learner.steps" not in text


def test_one_kind_and_one_setting_are_topics_too(shown):
    kind = shown("local", "--help", "learner.loss.ppo_clip", columns=100)
    assert "--learner.loss.dual-clip" in kind
    assert "highest-weight" not in kind
    setting = shown("learner", "--help", "learner.loss.clip-eps", columns=100)
    assert setting.split()[0] == "--learner.loss.clip-eps"
    assert len(setting.splitlines()) < 4


def test_all_is_every_setting_of_every_section(shown):
    text = shown("local", "--help=all", columns=100)
    for flag in (
        "--seed",
        "--bus.streams.replicas",
        "--learner.critic.optimizer.lr",
        "--metrics.wandb.project",
    ):
        assert flag in text


@pytest.mark.parametrize(
    ("topic", "message"),
    [
        ("learner.los", "no settings 'learner.los': did you mean 'loss'?"),
        ("lerner", "no settings 'lerner': did you mean 'learner'?"),
        ("learner.steps.x", "learner.steps is one setting, without others below"),
    ],
)
def test_a_topic_that_is_none_is_refused_with_the_nearest(topic: str, message: str, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["local", "--help", topic])
    assert message in capsys.readouterr().err


def test_a_process_has_help_for_its_own_sections_only(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["actors", "--help", "learner"])
    assert "there are: run, directory, bus" in capsys.readouterr().err
