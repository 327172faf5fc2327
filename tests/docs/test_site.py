"""The site's reference is complete, and its page of log events names events that there are."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import launch
from launch.cli import main as cli
from launch.settings.run_config import RunConfig
from launch.settings.sources import leaves
from tests.docs.documented_commands import all_commands, exists

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
PACKAGES = ("actors", "bus", "launch", "learner", "storage")
LEVELS = ("debug", "info", "warning", "error", "exception")
TOLD_ELSEWHERE = {"engine_failed", "engine_not_closed", "fleet_failed", "gateway_request_failed",
                  "gateway_turn_failed", "request_failed"}  # fmt: skip
"""Errors with a traceback, which is a bug to report, or that another event of the page announces."""


@pytest.fixture(scope="module")
def reference() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SITE / "reference.py")))


def test_the_reference_has_every_setting_and_no_other(reference: SimpleNamespace):
    page = reference.settings_page()
    told = set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
    defaults = {".".join(at) for at, _ in leaves(RunConfig().model_dump())}
    plain = {name for name in defaults if not name.endswith(".type")}
    assert [name for name in sorted(plain - told) if f"{{ #{name} }}" not in page] == []  # or a section
    assert [name for name in sorted(told) if ".NAME" not in name and not exists(name)] == []


def test_the_reference_has_every_command_with_what_it_does(reference: SimpleNamespace):
    page = reference.commands_page()
    sections = dict(re.findall(r"^### launch ([\w -]+)\n\n(.*)$", page, re.MULTILINE))
    assert {" ".join(path) for path in all_commands(cli.app)} <= set(sections)
    assert [name for name, about in sections.items() if not about.endswith((".", ":"))] == []
    flags = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*) \|$", page, re.MULTILINE))
    assert [name for name, meaning in flags.items() if not meaning] == []
    assert {"--preset", "--dry-run", "--run", "--nproc"} <= set(flags)


def test_the_reference_of_python_has_every_public_name(reference: SimpleNamespace):
    page = reference.python_page()
    assert re.findall(r"^::: .*\.(\w+)$", page, re.MULTILINE) == launch.__all__


def test_the_reference_says_of_every_room_what_it_holds(reference: SimpleNamespace):
    rooms = dict(re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", reference.rooms_page(), re.MULTILINE))
    assert {*PACKAGES, "learner/step", "tests/soak"} <= set(rooms)
    assert [room for room, holds in rooms.items() if not holds.endswith((".", ":"))] == []


def test_the_quick_start_is_the_readme(reference: SimpleNamespace):
    page = reference.quick_start((ROOT / "README.md").read_text())
    assert "](architecture.md)" in page
    assert "](docs/" not in page


def test_the_site_asks_nobody_else_for_anything():
    config = yaml.safe_load((SITE / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert "offline" in config["plugins"]
    assert not {"extra_css", "extra_javascript"} & set(config)


# --- log events ---


def events() -> Iterator[tuple[str, str]]:
    """Each event that is logged, with its level."""
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                match node:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="log"), attr=level),
                        args=[ast.Constant(name), *_],
                    ) if level in LEVELS:
                        yield str(name), level


def test_the_page_of_log_events_names_events_there_are_and_every_error():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    named = {name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
             for name in re.findall(r"`(\w+)`", row)}  # fmt: skip
    logged = dict(events())
    assert sorted(named - set(logged) - {"process_failed", "process_crashed"}) == []
    errors = {name for name, level in logged.items() if level in ("error", "exception")}
    assert sorted(errors - named - TOLD_ELSEWHERE) == []
