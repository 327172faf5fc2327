"""Tests that come with a prompt, in the shapes of the usual data sets."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.episodes.task import JSON

FIELD = "tests"
"""Field of a prompt's metadata that holds its tests; without it they are the label, as JSON."""
SHAPES = (
    'give {"inputs": [...], "outputs": [...]}, a list of {"input": ..., "output": ...}, a list of assert '
    'statements, {"test_list": [...]}, or {"test": ..., "entry_point": ...}'
)


class BadTestsError(ValueError):
    """What should be a prompt's tests are none."""


@dataclass(frozen=True, slots=True)
class InputTest:
    """What a program reads, and what it is to print."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A function, what it is called with, and what it may return."""

    function: str
    arguments: Sequence[JSON]
    returns: Sequence[JSON]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTests:
    """All tests of a prompt, of one kind or several."""

    inputs: tuple[InputTest, ...] = ()
    calls: tuple[CallTest, ...] = ()
    statements: tuple[str, ...] = ()
    """Python that raises where the program is wrong."""
    setup: str = ""
    """Python before the statements."""
    entry: str | None = None
    """Function that the statements call by this name or as `candidate`."""

    def __len__(self) -> int:
        return len(self.inputs) + len(self.calls) + len(self.statements)


def read_tests(metadata: Mapping[str, JSON], label: str | None) -> GivenTests:
    """Return the tests of a prompt. Raises BadTestsError, which says what is wrong and what to give."""
    given = metadata.get(FIELD)
    if given is None:
        given = label
    if given is None:
        raise BadTestsError(f"it has no tests, neither as metadata.{FIELD} nor as its label: {SHAPES}")
    if isinstance(given, str):
        given = _decoded(given, "its tests are no JSON")
    if isinstance(given, Mapping):
        found = _of_object({key: value for key, value in given.items() if value is not None})
    elif isinstance(given, Sequence) and not isinstance(given, str):
        found = _of_list(given, metadata)
    else:
        raise BadTestsError(f"its tests are {_shown(given)}: {SHAPES}")
    if not len(found):
        raise BadTestsError(f"it has tests, but not one in them: {SHAPES}")
    return found


def _of_object(given: Mapping[str, JSON]) -> GivenTests:
    if "inputs" in given or "outputs" in given:
        return _apps(given)
    if "test" in given:
        return _humaneval(given)
    if "test_list" in given:
        imports = [_text(one, "test_imports") for one in _list(given.get("test_imports", ()), "test_imports")]
        setup = _text(given.get("test_setup_code", ""), "test_setup_code")
        return _asserts(_list(given["test_list"], "test_list"), "\n".join([*imports, setup]), given)
    raise BadTestsError(f"its tests have the fields {', '.join(given) or 'none'}: {SHAPES}")


def _of_list(given: Sequence[JSON], metadata: Mapping[str, JSON]) -> GivenTests:
    if all(isinstance(one, str) for one in given):
        return _asserts(given, "", {})
    inputs, calls = list[InputTest](), list[CallTest]()
    for number, one in enumerate(given):
        if not isinstance(one, Mapping) or not {"input", "output"} <= one.keys():
            raise BadTestsError(f"its test {number} is {_shown(one)}: {SHAPES}")
        read, written = (_text(one[key], f"{key} of test {number}") for key in ("input", "output"))
        kind = one.get("testtype") or "stdin"
        if kind == "stdin":
            inputs.append(InputTest(read, written))
        elif kind == "functional":
            name = one.get("fn_name") or metadata.get("fn_name") or metadata.get("func_name")
            lines = [line for line in read.split("\n") if line.strip()]
            arguments = [_decoded(line, f"the input of test {number} is no line of JSON") for line in lines]
            returned = _decoded(written, f"the output of test {number} is no JSON")
            calls.append(CallTest(_name(name, "fn_name"), arguments, [returned]))
        else:
            raise BadTestsError(f"the testtype of test {number} is {kind!r}: it is stdin or functional")
    return GivenTests(inputs=tuple(inputs), calls=tuple(calls))


def _apps(given: Mapping[str, JSON]) -> GivenTests:
    """Read APPS' own shape; with `fn_name`, inputs are lists of arguments and an output may be in a list."""
    inputs, outputs = (_list(given.get(key), key) for key in ("inputs", "outputs"))
    if len(inputs) != len(outputs):
        raise BadTestsError(
            f"its tests have {len(inputs)} inputs and {len(outputs)} outputs: give one for one"
        )
    pairs = list(zip(inputs, outputs, strict=True))
    if "fn_name" not in given:
        read = [InputTest(_lines(one, "inputs"), _lines(other, "outputs")) for one, other in pairs]
        return GivenTests(inputs=tuple(read))
    name = _name(given["fn_name"], "fn_name")
    calls = [
        CallTest(name, _list(one, "an input for fn_name"), [other, *_alone(other)]) for one, other in pairs
    ]
    return GivenTests(calls=tuple(calls))


def _alone(output: JSON) -> list[JSON]:
    return list(output) if isinstance(output, list | tuple) and len(output) == 1 else []


def _humaneval(given: Mapping[str, JSON]) -> GivenTests:
    source = _text(given["test"], "test")
    entry = _name(given.get("entry_point"), "entry_point")
    body = _parsed(source, "test").body
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body):
        raise BadTestsError("its test defines no function check: HumanEval's do, give that or a test_list")
    _refuse_idle(source, "test")
    return GivenTests(setup=source, statements=("check(candidate)",), entry=entry)


def _asserts(given: Sequence[JSON], setup: str, named: Mapping[str, JSON]) -> GivenTests:
    statements = tuple(_text(one, f"test {number}") for number, one in enumerate(given))
    for number, one in enumerate(statements):
        _parsed(one, f"test {number}")
        _refuse_idle(one, f"test {number}")
    _parsed(setup, "setup")
    entry = _name(named["entry_point"], "entry_point") if "entry_point" in named else None
    return GivenTests(statements=statements, setup=setup, entry=entry)


def _refuse_idle(source: str, where: str) -> None:
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(ast.parse(source))):
        raise BadTestsError(f"its {where} asserts nothing, so that every program would pass: {source[:80]!r}")


def _parsed(source: str, where: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTestsError(f"its {where} is no Python ({error}): {source[:80]!r}") from error


def _decoded(text: str, problem: str) -> JSON:
    try:
        decoded: JSON = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadTestsError(f"{problem} ({error}): {text[:80]!r}; {SHAPES}") from error
    return decoded


def _list(value: JSON, where: str) -> Sequence[JSON]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise BadTestsError(f"its {where} is {_shown(value)}: give a list")
    return value


def _lines(value: JSON, where: str) -> str:
    """Return a text; some of APPS' are lists of lines."""
    if isinstance(value, list | tuple):
        return "\n".join(_text(one, where) for one in value)
    return _text(value, where)


def _text(value: JSON, where: str) -> str:
    if not isinstance(value, str):
        raise BadTestsError(f"its {where} is {_shown(value)}: give a text")
    return value


def _name(value: JSON, where: str) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise BadTestsError(f"its {where} is {_shown(value)}: name the function that the tests call")
    return value


def _shown(value: JSON) -> str:
    return repr(value)[:80]
