"""What text, settings and strings name of the code exists: modules, functions, and files.

Neither types nor imports hold a name in a string, such as `learner.run.service:train` in a command."""

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = r"(?:bus|storage|actors|learner|launch|tests)"
FUNCTION = re.compile(rf"(?<![\w./:-])({PACKAGE}(?:\.\w+)+):([A-Za-z_]\w*)")
MODULE = re.compile(rf"(?:-m[ \",']+|import_module\([\"'])({PACKAGE}(?:\.\w+)*)\b")
IMPORT = re.compile(rf"from ({PACKAGE}(?:\.\w+)*) import ([\w, ]+)")
FILE = re.compile(rf"(?<![\w./-])((?:{PACKAGE}|docs)/[\w./-]+\.(?:py|md|toml|sh|yaml|js|json|jsonl))\b")
READ = (".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".ipynb", "Makefile")
NOT_HERE = {
    "launch/cli/version_commands.py", "launch/screens/reward_line.py", "storage/weights/blob_fsspec.py",
    "learner/backends/megatron/conversion/my_family.py",
    "learner.mine:reward", "bus/test_bus.py", "launch/cli.py",
}  # fmt: skip
"""Files that readers of docs/extending.md write, and names that tests make up."""


@functools.cache
def source(module: str) -> str | None:
    """The text of a module, and the names of the modules in it where it is a package; None for none."""
    path = ROOT / module.replace(".", "/")
    if path.with_suffix(".py").is_file():  # beside it may lie what is left of a folder of its name
        return path.with_suffix(".py").read_text()
    if path.is_dir():
        inside = "\n".join(f"import {one.stem}" for one in path.iterdir())
        own = path / "__init__.py"
        return inside + (own.read_text() if own.is_file() else "")
    return None


@functools.cache
def has(module: str, name: str) -> bool:
    """Tell whether a module defines or imports a name."""
    definition = rf"^\s*(?:async def |def |class |import |type )?{name}\b(?=[\s:=(\[]|$)|import .*\b{name}\b"
    text = source(module)
    return text is not None and re.search(rf"{definition}|^    {name},$", text, re.MULTILINE) is not None


def missing(text: str, *, python: bool) -> Iterator[str]:
    """Yield what a text names that does not exist."""
    for found in FUNCTION.finditer(text):
        if not has(*found.groups()):
            yield found[0]
    for found in MODULE.finditer(text):
        if source(found[1]) is None:
            yield found[0]
    for found in IMPORT.finditer(text):
        is_code = not text[text.rfind("\n", 0, found.start()) + 1 : found.start()].strip()
        if not (python and is_code):  # whoever runs or types a file finds its own imports
            names = [name.split()[0] for name in found[2].split(",") if name.strip()]
            yield from (f"{found[1]}:{name}" for name in names if not has(found[1], name))
    for found in FILE.finditer(text):
        if not (ROOT / found[1]).exists():
            yield found[1]


def test_what_is_named_in_text_exists():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wrong = []
    for name in filter(lambda one: one.endswith(READ), files.splitlines()):
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            text = path.read_text()
            wrong += [
                (name, one) for one in missing(text, python=name.endswith(".py")) if one not in NOT_HERE
            ]
    assert not wrong


def test_what_does_not_exist_is_found():
    planted = (
        'COMMAND = "learner.run.service:gone"; run_module("launch.gone:main")\n'
        'CHILD = "import sys; from actors.rewards.scoring.sample_call import main, gone; main()"\n'
        'args = [sys.executable, "-m", "storage.gone"]; import_module("actors.gone")\n'
        "See `learner/run/gone.py` and docs/gone.md; learner/run/service.py is there.\n"
        "from learner.gone import code  # its own import fails by itself\n"
    )
    assert list(missing(planted, python=True)) == [
        "learner.run.service:gone", "launch.gone:main", '-m", "storage.gone', 'import_module("actors.gone',
        "actors.rewards.scoring.sample_call:gone", "learner/run/gone.py", "docs/gone.md",
    ]  # fmt: skip
    assert "learner.gone:code" in list(missing(planted, python=False))
