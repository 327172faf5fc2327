"""What a program or a cell gives as it is becomes a file that another process can import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = '''
import functools, linecache, math, sys
import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path
from random import randint
from fractions import Fraction as Share
from launch.api.given import GivenFiles

HALF, WORDS, OPEN = 0.5, {"a": [1, None]}, open(__file__)
LIMITS, result = [-float("inf"), float("inf")], OPEN

def twice(value):
    return 2 * value

doubled = twice
triple = lambda value: 3 * value

@functools.cache
def nothing():
    return len(xml.etree.ElementTree.fromstring("<a/>"))

def reward(answer):
    """Needs all of the above."""
    result = doubled(HALF) * math.floor(Share(3, 2)) + len(WORDS)  # a variable, and not the notebook's
    return min(result + nothing() + triple(randint(0, 0)), LIMITS[1])

def reads(answer):
    return OPEN.read()

def outer():
    def inner(answer):
        return 0.0
    return inner

CELL = """
class Base:
    def begin(self):
        return HALF

@dataclass
class Environment(Base):
    length: float = 3

    def run(self):
        return self.length * self.begin()
"""
linecache.cache["<cell>"] = (len(CELL), None, CELL.splitlines(keepends=True), "<cell>")
exec(compile(CELL, "<cell>", "exec"))
files = GivenFiles(Path(sys.argv[1]))
prompts = files.prompts(["one", {"prompt": [{"role": "user", "content": "two"}], "label": "2"}])
print(files.named(reward), files.named(Environment), files.named(Share), prompts)
earlier = twice
def twice(value):
    return value

def reads_earlier(answer):
    return earlier(1)

calls = [(files.named, one) for one in (reads, outer(), earlier, reads_earlier, functools.partial(twice, 1))]
calls += [(files.prompts, one) for one in ({"prompt": ["one"]}, [1], [{"prompt": "a", "label": OPEN}])]
for call, refused in calls:
    try:
        call(refused)
    except Exception as error:
        print(type(error).__name__, error)
assert files.write()
'''


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The directory of the run, and what the program printed."""
    directory = tmp_path_factory.mktemp("run")
    program = directory / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, directory], capture_output=True, text=True, check=False, cwd=Path.cwd(),
        env={"PYTHONPATH": str(Path.cwd()), "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return directory, done.stdout.splitlines()


def test_another_process_calls_functions_and_classes_with_all_that_they_use(given: tuple[Path, list[str]]):
    directory, [names, *_] = given
    reward, environment, share, _ = names.split()
    assert share == "fractions:Fraction"
    (module, function), (other, kind) = (name.split(":") for name in (reward, environment))
    said = f"import {module}, {other}; print({module}.{function}(None), {other}.{kind}(4).run())"
    done = subprocess.run(
        [sys.executable, "-c", said], capture_output=True, text=True, check=True, cwd=directory / "given"
    )
    assert done.stdout.split() == ["2.0", "2.0"]


def test_prompts_are_rows_of_a_file(given: tuple[Path, list[str]]):
    path = Path(given[1][0].split()[-1])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"prompt": "one"},
        {"prompt": [{"role": "user", "content": "two"}], "label": "2"},
    ]


def test_what_no_file_can_hold_is_refused_by_name(given: tuple[Path, list[str]]):
    for said, expected in zip(
        given[1][1:],
        (
            "OPEN is TextIOWrapper, which no file can hold as it is: make it in",
            "outer.<locals>.inner has no name of its own",
            "twice is not the twice that is defined now",
            "earlier is not the twice that is defined now",
            "partial(...) has no name of its own",
            "prompts is dict: give a list",
            "prompt 1 is int",
            "prompt 1 is no JSON",
        ),
        strict=True,
    ):
        assert said.startswith(f"ConfigError {expected}")
