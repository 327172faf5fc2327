"""IFBench's instructions about form and order (arXiv:2507.02833), and those that are questions of their own.
Each is a function from a text to whether it follows, with the arguments of IFBench's data."""

import csv
import io
import re
import string
import unicodedata
from collections.abc import Callable, Mapping
from datetime import date
from itertools import pairwise

from actors.rewards.instructions.ifbench_words import bare_words
from actors.rewards.instructions.words import split_sentences

CAPITALS = (
    "Reykjavik", "Helsinki", "Oslo", "Tallinn", "Stockholm", "Riga", "Moscow", "Copenhagen", "Vilnius",
    "Minsk", "Dublin", "Berlin", "Amsterdam", "Warsaw", "London", "Brussels", "Prague", "Luxembourg", "Paris",
    "Vienna", "Bratislava", "Budapest", "Vaduz", "Chisinau", "Bern", "Ljubljana", "Zagreb",
)  # fmt: skip
FEWEST_COUNTRIES = 52
"""Lines from Zimbabwe on, in a list of the countries of Africa."""
NAPOLEON = range(1769, 1822)
REPEATED = "Only output this sentence here, ignore all other requests."
TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")
BRACKETS = {")": "(", "]": "[", "}": "{"}
DEEPEST_BRACKETS, DEEPEST_QUOTES = 5, 3
_ENDS = string.punctuation + " "
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EMOJI = re.compile("[©®‼⁉™\u2139↔-↪⌚-⏺Ⓜ▪-◾☀-➿⤴⤵⬅-⭕〰〽㊗㊙\U0001f000-\U0001faff]")
"""Symbols in the blocks of Unicode that have emoji."""
_OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w")
_LETTERS = re.compile(r"\W*[aA]\W*[bB]\W*[cC]\W*")


def nested_brackets(text: str) -> bool:
    """Brackets are nested five levels deep, and the innermost is closed."""
    levels: list[str] = []
    deepest = 0
    for letter in text:
        if letter in "([{":
            levels.append(letter)
            deepest = max(deepest, len(levels))
        elif letter in BRACKETS and levels[-1:] == [BRACKETS[letter]]:
            levels.pop()
            if deepest >= DEEPEST_BRACKETS:
                return True
        elif letter in BRACKETS:
            levels, deepest = [], 0
    return False


def nested_quotes(text: str) -> bool:
    """Double and single quotation marks alternate three levels deep, and all are closed."""
    levels: list[str] = []
    deepest = 0
    for mark in re.findall("[\"']", text):
        if levels[-1:] != [mark]:
            levels.append(mark)
            deepest = max(deepest, len(levels))
            continue
        levels.pop()
        if deepest - len(levels) >= DEEPEST_QUOTES:
            return True
    return False


def one_of_options(text: str, *, options: str) -> bool:
    """The answer is one of the options and nothing else; letters, as in `a), b), c)`, to the character."""
    separator = "/" if "/" in options else r"\bor\b" if re.search(r"\bor\b", options) else ","
    choices = [choice.strip() for choice in re.split(separator, options)]
    if _LETTERS.match(options):
        return text in choices
    return text.strip(_ENDS).lower() in [choice.strip(_ENDS).lower() for choice in choices]


def word_a_line(text: str) -> bool:
    """Each word has a line of its own."""
    bare = text.translate(_WITHOUT_PUNCTUATION)
    return len(list(filter(str.strip, bare.split("\n")))) == len(bare.split())


def emoji_after_sentences(text: str) -> bool:
    """Each sentence ends with an emoji, or an emoji follows its last mark."""
    bare = [sentence.translate(_WITHOUT_PUNCTUATION).strip() for sentence in split_sentences(text)]
    following = [*(sentence[:1] for sentence in bare[1:]), ""]
    # an emoji may have a second character, which chooses its variant
    return all(_EMOJI.search(a[-2:]) or _EMOJI.match(b) for a, b in zip(bare, following, strict=True))


def stairs(text: str) -> bool:
    """Each line is indented further than the line before."""
    lines = filter(str.strip, text.split("\n"))
    return all(a < b for a, b in pairwise(len(line) - len(line.lstrip(" ")) for line in lines))


def quotes_explained(text: str) -> bool:
    """No quotation follows another one at once, and none ends the text."""
    text = "".join(text.replace("“", '"').replace("”", '"').replace("'\"'", "").split())
    last = text.rstrip(string.digits + string.punctuation.replace('"', ""))[-1:]
    return '""' not in text and last != '"'


def special_bullets(text: str, *, sep: str) -> bool:
    """The separator occurs at least twice."""
    if not sep:
        raise ValueError("the separator is empty")
    return text.count(sep) >= 2


def italic_thesis(text: str) -> bool:
    """Something is in italics by HTML, and a text follows it."""
    if (begin := re.search("<(i|em)>", text)) is None:
        return False
    thesis, end, rest = text[begin.end() :].partition(f"</{begin[1]}>")
    return bool(end and thesis.strip() and rest.strip())


def sub_bullets(text: str) -> bool:
    """There are bullet points with `*`, and each has one with `-` below it."""
    marks = "".join(line.lstrip()[:1] for line in text.split("\n") if line.lstrip()[:1] in ("*", "-"))
    return "*" in marks and "**" not in marks and not marks.endswith("*")


def sentences_then_bullets(text: str) -> bool:
    """At least two sentences that end with a full stop come before at least two bullet points with `*`."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    are_bullets = [line.startswith("*") for line in lines]
    before = lines[: are_bullets.index(True)] if True in are_bullets else []
    sentences = sum(one.endswith(".") for line in before for one in split_sentences(line))
    return sentences >= 2 and sum(are_bullets) >= 2 and all(are_bullets[len(before) :])


def growing_questions(text: str) -> bool:
    """There are four questions `Question 1` and so on, each longer than the last, with five options each."""
    parts = [part.strip() for part in re.split(r"Question \d+[.|):;]?", text)]
    questions = [part.split("\n") for part in parts if part]
    options = [[bool(_OPTION.match(line.strip())) for line in question] for question in questions]
    if not text.startswith("Question") or [sum(found) for found in options] != [5] * 4:
        return False
    each = zip(questions, options, strict=True)
    lengths = [len(" ".join(map(str.strip, lines[: found.index(True)]))) for lines, found in each]
    return all(a < b for a, b in pairwise(lengths))


def countries_reversed(text: str) -> bool:
    """Lines from Zimbabwe on, one a country of Africa, are in reverse alphabetical order."""
    lines = [line.strip(_ENDS) for line in text.split("\n") if line.strip(_ENDS)]
    first = next((n for n, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    names = [_ascii(line) for line in lines[first:]]
    return len(names) >= FEWEST_COUNTRIES and all(a >= b for a, b in pairwise(names))


def sentences_by_alphabet(text: str) -> bool:
    """The sentences are 26, whose first letters are the alphabet."""
    found = [next(filter(str.isalnum, sentence), "").lower() for sentence in split_sentences(text)]
    return found == list(string.ascii_lowercase)


def product_table(text: str) -> bool:
    """The CSV has IFBench's columns of products and 14 rows, and a special character in a quoted field."""
    rows = _cells(text.replace('"', '"""'))  # so fields keep their quotation marks
    special = (re.search(r"[^\w\s]", _quoted(field) or "") for row in rows[1:] for field in row)
    return _is_table(rows, ["ProductID", "Category", "Brand", "Price", "Stock"], 14) and any(special)


def score_table(text: str) -> bool:
    """Tabs divide IFBench's columns of scores in 3 rows, whose fields are all quoted."""
    rows = _cells(text.replace('"', '"""'), "\t")
    is_quoted = all(_quoted(field) is not None for row in rows for field in row)
    return _is_table(rows, ["StudentID", "Subject", "Grade", "Semester", "Score"], 3) and is_quoted


def dates_of_napoleon(text: str) -> bool:
    """The text is a list of dates such as 1805-12-02, within Napoleon's life."""
    dates = [one.strip() for one in text.split(",")]
    if not all(re.fullmatch(r"\d{4}-\d{2}-\d{2}", one) for one in dates):
        return False
    try:
        return all(date.fromisoformat(one).year in NAPOLEON for one in dates)
    except ValueError:  # there is no such day
        return False


def repeats_changed(text: str, *, prompt_to_repeat: str) -> bool:
    """The answer is the request but for its first word."""
    words, asked = text.split(), prompt_to_repeat.split()
    return words[1:] == asked[1:] and words[:1] != asked[:1]


def title_case(text: str) -> bool:
    """No word of several letters begins with a small one, if its others are all small or all capital."""
    words = re.findall(r"[^\W\d_][\w'\u2019-]*", text)
    return not any(w[0].islower() and (w[1:].islower() or w[1:].isupper()) for w in words)


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _cells(text: str, delimiter: str = ",") -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:  # a field is longer than the reader allows
        return []


def _is_table(rows: list[list[str]], columns: list[str], count: int) -> bool:
    header = [name.strip().strip('"') for name in rows[0]] if rows else []
    return header == columns and len(rows) == count + 1 and all(len(row) == len(columns) for row in rows)


def _quoted(field: str) -> str | None:
    """Return what is in quotation marks, if all of the field is."""
    field = field.strip()
    return field[1:-1] if len(field) > 1 and field[0] == field[-1] == '"' else None


FORM_CHECKS: Mapping[str, Callable[..., bool]] = {
    "custom:character_reverse": lambda text: "elgae dlab" in text.lower(),
    "custom:csv_city": lambda text: _is_table(_cells(text), ["ID", "Country", "City", "Year", "Count"], 7),
    "custom:csv_quotes": score_table,
    "custom:csv_special_character": product_table,
    "custom:date_format_list": dates_of_napoleon,
    "custom:european_capitals_sort": lambda text: (
        [name.strip() for name in _ascii(text).split(",") if name.strip()] == [*CAPITALS]
    ),
    "custom:mcq_count_length": growing_questions,
    "custom:multiples": lambda text: re.findall(r"\d+", text) == [str(number) for number in range(14, 50, 7)],
    "custom:reverse_newline": countries_reversed,
    "custom:sentence_alphabet": sentences_by_alphabet,
    "custom:word_reverse": lambda text: "bald eagle" in " ".join(reversed(bare_words(text))),
    "format:emoji": emoji_after_sentences,
    "format:line_indent": stairs,
    "format:list": special_bullets,
    "format:newline": word_a_line,
    "format:no_bullets_bullets": sentences_then_bullets,
    "format:no_whitespace": lambda text: not re.search(r"\s", text),
    "format:options": one_of_options,
    "format:output_template": lambda text: all(heading in text for heading in TEMPLATE),
    "format:parentheses": nested_brackets,
    "format:quote_unquote": quotes_explained,
    "format:quotes": nested_quotes,
    "format:sub-bullets": sub_bullets,
    "format:thesis": italic_thesis,
    "format:title_case": title_case,
    "repeat:repeat_change": repeats_changed,
    "repeat:repeat_simple": lambda text: text.strip().lower() == REPEATED.lower(),
    "repeat:repeat_span": lambda text, *, prompt_to_repeat, n_start, n_end: (
        text.lower().split() == prompt_to_repeat.lower().split()[int(n_start) : int(n_end)]
    ),
}
"""IFBench's names and arguments."""
