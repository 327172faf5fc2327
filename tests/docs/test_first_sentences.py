"""First sentences of docstrings, and comments, name a noun before they say it or them of it."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("bus", "storage", "actors", "learner", "launch")
DOCSTRING = re.compile(r'^[ \t]*"""(\w[^"]*)', re.MULTILINE)
LEANING = {"it", "its", "they", "them", "their", "those"}
WORDS = """
a again all also and as at because before begin behind beside besides build by call close count drop else
end every few find first for free from get give have here how if in is last leave let lock make many more
most newest of on only or out over read return returns run said say says send set some start stop take
tell tells than that then to until unless wait was what when where whether which while who why with
without write yield yields
"""
WITHOUT_NOUN = frozenset(WORDS.split())
"""Words that name nothing."""


def beginnings(text: str) -> Iterator[str]:
    """Yield the texts of docstrings, and the first lines of comments."""
    yield from DOCSTRING.findall(text)
    before = ""
    for line in text.splitlines():
        code, mark, said = line.partition("# ")
        if mark and (code.strip() or not before.lstrip().startswith("#")):
            yield said
        before = line


def leans(said: str) -> bool:
    """Return whether a text says `it` or the like before its first noun."""
    for word in re.findall(r"[a-z']+|`|[^a-z' ]", said[:80].lower()):
        if word not in WITHOUT_NOUN:
            return word in LEANING
    return False


def leaning(text: str) -> list[str]:
    return [said for said in beginnings(text) if leans(said)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('    """Return whether it is there."""\n', 1),
        ('    """Those of the newest version."""\n', 1),
        ("    except OSError:  # it has ended\n", 1),
        ('    """Return whether the server is there, and what it does."""\n', 0),
        ("    except OSError:  # the process has ended: it is gone\n", 0),
        ('    """`name` is what it has."""\n', 0),
    ],
)
def test_a_beginning_leans_where_no_noun_stands_before(text, found):
    assert len(leaning(text)) == found


def test_no_first_sentence_leans_on_what_it_does_not_name():
    command = ["git", "ls-files", *(f"{package}/**.py" for package in PACKAGES)]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(files) > 500
    found = {path: leaning((ROOT / path).read_text()) for path in files}
    assert {path: said for path, said in found.items() if said} == {}
