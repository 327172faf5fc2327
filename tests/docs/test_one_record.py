"""Nobody asks for the class or the name of a choice: what others go by is stated by its record."""

import ast
import re
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from actors.settings.actors import EnvironmentConfig
from actors.settings.engines import EngineConfig
from storage.model_files.families import FAMILIES
from storage.settings.weights_transport import TransportConfig
from tests.learner.choices import RECORDS

pytestmark = pytest.mark.slow

PACKAGES = ("bus", "storage", "actors", "learner", "launch")
ROOT = Path(__file__).parents[2]
UNIONS = (EnvironmentConfig, EngineConfig, TransportConfig)
ENVIRONMENTS, ENGINES, TRANSPORTS = (get_args(get_args(union)[0]) for union in UNIONS)
KINDS = {
    "an algorithm": (RECORDS, ("learner", "launch")),
    "an environment": (ENVIRONMENTS, ("actors", "launch")),
    "an engine": (ENGINES, ("storage", "learner", "actors", "launch")),
    "a transport": (TRANSPORTS, ("storage", "learner", "actors", "launch")),
}


def asked_for(text: str, records: Collection[type[BaseModel]]) -> list[str]:
    """Return where code asks whether something is one of these records, by class or by name."""
    classes = {kind.__name__ for kind in records}
    names = {get_args(kind.model_fields["type"].annotation)[0] for kind in records}
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            asked = {getattr(one, "id", "") for one in ast.walk(node.args[1])} & classes
        elif isinstance(node, ast.MatchClass):
            asked = {getattr(node.cls, "id", "")} & classes
        elif isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "type":
            asked = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)} & names
        else:
            continue
        found += [f"{getattr(node, 'lineno', 0)}: {name}" for name in sorted(asked)]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_code_asks_for_the_class_or_the_name_of_a_choice(kind: str):
    records, packages = KINDS[kind]
    files = subprocess.check_output(["git", "ls-files", *packages], cwd=ROOT, text=True).split()
    texts = {file: (ROOT / file).read_text() for file in files if file.endswith(".py")}
    asking = {file: text for file, text in texts.items() if ".type" in text or "isinstance" in text}
    assert len(asking) > 50
    found = {file: where for file, text in asking.items() if (where := asked_for(text, records))}
    assert found == {}


def looked_up(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what code looks up in a table, tests for membership or compares with a text."""
    if isinstance(node, ast.Subscript):
        yield node.slice
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get":
        yield from node.args[:1]
    elif isinstance(node, ast.Compare) and (
        isinstance(node.ops[0], ast.In | ast.NotIn) or isinstance(node.comparators[0], ast.Constant)
    ):
        yield node.left


def told_by_family(text: str) -> list[int]:
    """Return the lines where code goes by a `model_type`, or lists names of families."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = [getattr(one, "attr", getattr(one, "id", "")) for one in looked_up(node)]
        listed = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        families = [one for one in listed if isinstance(one, ast.Constant) and one.value in FAMILIES]
        found += [getattr(node, "lineno", 0)] * ("model_type" in names or len(families) > 1)
    return found


def test_no_code_goes_by_the_name_of_a_family():
    files = subprocess.check_output(["git", "ls-files", *PACKAGES], cwd=ROOT, text=True).split()
    texts = {file: (ROOT / file).read_text() for file in files if file.endswith(".py")}
    words = re.compile("|".join(["model_type", *(f'"{name}"' for name in FAMILIES)]))
    named = {file: text for file, text in texts.items() if words.search(text)}
    found = {file: lines for file, text in named.items() if (lines := told_by_family(text))}
    calls = {"actors/policy/tool_calls.py", "actors/settings/actors.py"}  # formats of calls, not families
    foreign = {"storage/model_files/text_model.py"}  # a table of transformers
    assert found.keys() == {"storage/model_files/families.py"} | calls | foreign


@pytest.mark.parametrize(
    "planted",
    [
        "if config.model_type in KNOWN: pass",
        "same = model_type == 'qwen3'",
        "kind = TABLE.get(config.model_type)",
        "kind = TABLE[model_type]",
        "TABLE = {'qwen3': 1, 'llama': 2}",
        "KNOWN = frozenset({'qwen3', 'llama'})",
    ],
)
def test_code_that_goes_by_the_name_of_a_family_is_found(planted: str):
    assert set(told_by_family(planted)) == {1}


def test_screens_hear_processes_by_one_reader():
    heard = subprocess.check_output(["git", "grep", "-hF", "Status, ", "launch"], cwd=ROOT, text=True)
    hearing = re.findall(r"listen\(bus\.subject\(\"status\", [^)]+\), Status, (?:partial\()?([\w.]+)", heard)
    own = {"hear"}  # storage, which refuses settings by which a living process would not go on
    assert len(hearing) > 4
    assert set(hearing) == {"monitor.on_status", "state.monitor.on_status"} | own


def test_code_that_asks_for_a_choice_is_found():
    planted = "isinstance(loss, PPOClipLoss | int)\n(a.type in ('gspo', 'x')) or b.type != 'grpo'"
    assert sorted(asked_for(planted, RECORDS)) == ["1: PPOClipLoss", "2: grpo", "2: gspo"]
    assert asked_for("match a:\n  case GameConfig():\n    pass", ENVIRONMENTS) == ["2: GameConfig"]
    assert asked_for("device.type == 'cuda' or isinstance(x, Objective)", RECORDS) == []
