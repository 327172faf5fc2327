"""No code asks for the text of an error, but by `bus/errors.py`."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PACKAGES = ("bus", "storage", "actors", "learner", "launch")
ROOT = Path(__file__).parents[2]
TABLE = "bus/errors.py"
TEXT_OF_ERROR = r"(?s)\bas (\w+):.*\b(str|repr)\(\1\)|\b(\w+): [\w.]*(Error|Exception).*\b(str|repr)\(\3\)"
SEARCHES = {"startswith", "endswith", "find", "index", "count", "search", "match", "fullmatch", "findall"}


def errors_in(tree: ast.AST) -> set[str]:
    """Return the names that code gives to errors: those that it catches, and arguments that are one."""
    nodes = list(ast.walk(tree))
    caught = {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    return caught | {node.arg for node in nodes if isinstance(node, ast.arg) and _is_error(node.annotation)}


def _is_error(annotation: ast.AST | None) -> bool:
    if isinstance(annotation, ast.BinOp):  # Exception | None
        annotation = annotation.left
    name = getattr(annotation, "attr", getattr(annotation, "id", ""))
    return name.endswith(("Error", "Exception"))


def asked(text: str) -> Iterator[str]:
    """Yield where code looks for something in the text of an error, which may have a name by then."""
    tree = ast.parse(text)
    errors, texts = errors_in(tree), set[str]()

    def is_text(node: ast.AST) -> bool:
        return any(
            getattr(one, "id", "") in texts
            or (isinstance(one, ast.Call) and getattr(one.func, "id", "") in ("str", "repr")
                and one.args and getattr(one.args[0], "id", "") in errors)
            for one in ast.walk(node)
        )  # fmt: skip

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_text(node.value):
            texts |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            searches = any(isinstance(one, ast.In | ast.NotIn) for one in node.ops)
            found = (searches or any(isinstance(one, ast.Constant) for one in sides)) and any(
                map(is_text, sides)
            )
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SEARCHES:
            found = any(map(is_text, (node.func, *node.args)))
        else:
            continue
        if found:
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_code_asks_for_the_text_of_an_error():
    files = subprocess.check_output(["git", "ls-files", *PACKAGES], cwd=ROOT, text=True).split()
    texts = {file: (ROOT / file).read_text() for file in files if file.endswith(".py") and file != TABLE}
    telling = {file: text for file, text in texts.items() if re.search(TEXT_OF_ERROR, text)}
    assert len(telling) > 50
    found = {file: where for file, text in telling.items() if (where := list(asked(text)))}
    assert found == {}


QUESTIONS = (
    *("'gloo' in str(error)", "str(error).startswith('x')", "re.search('x', str(error))"),
    "said = str(error); 'x' in said",
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_found(question: str):
    assert list(asked(f"try: pass\nexcept OSError as error:\n    {question}"))
