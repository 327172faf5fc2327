"""IFBench's instructions about words and sentences (arXiv:2507.02833), with the arguments of its data. Each
is a function from a text to whether it follows."""

# ruff: noqa: N803 - arguments are named as in the data of IFBench

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from itertools import chain, groupby, islice, pairwise
from types import ModuleType
from typing import Protocol

from actors.rewards.instructions.words import split_sentences

_WORD = re.compile(r"\w+")
NAMES = frozenset(_WORD.findall(
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia "
    "Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett "
    "Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria "
    "Joseph Claire Ryan Stella Jonathan"
))  # fmt: skip
PRONOUNS = frozenset(_WORD.findall(
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she "
    "her hers herself it its itself they them their theirs themselves"
))  # fmt: skip
CONJUNCTIONS = frozenset(("and", "but", "for", "nor", "or", "so", "yet"))
# NLTK's list for English, which is Snowball's with additions, but for words with an apostrophe: a word is a
# run of letters and digits here.
STOP_WORDS = frozenset(_WORD.findall(
    "a about above after again against ain all am an and any are aren as at be because been before being "
    "below between both but by can couldn d did didn do does doesn doing don down during each few for "
    "from further had hadn has hasn have haven having he her here hers herself him himself his how i if "
    "in into is isn it its itself just ll m ma me mightn more most mustn my myself needn no nor not now o "
    "of off on once only or other our ours ourselves out over own re s same shan she should shouldn so "
    "some such t than that the their theirs them themselves then there these they this those through to "
    "too under until up ve very was wasn we were weren what when where which while who whom why will with "
    "won wouldn y you your yours yourself yourselves"
))  # fmt: skip
PRIMES = frozenset(n for n in range(2, 98) if all(n % divisor for divisor in range(2, n)))
OVERLAP_TOLERANCE = 2
"""Percent by which the overlap of trigrams may differ."""
_CLOSING = "\"')]\u201d\u2019"
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
# Words, both parts of contractions as NLTK has them, and each mark of punctuation.
_TOKEN = re.compile(r"\w+(?=n't\b)|n't\b|'(?:s|m|d|ll|re|ve)\b|\w+(?:[-.,:/]\w+)*|[^\w\s]")


def bare_words(text: str) -> list[str]:
    """Return the words in lower case, without any punctuation."""
    return text.lower().translate(_WITHOUT_PUNCTUATION).split()


def stripped_words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation at their ends."""
    words = (word.strip(string.punctuation) for word in text.lower().split())
    return [word for word in words if word]


def tokens(text: str) -> list[str]:
    """Return words and marks of punctuation."""
    return _TOKEN.findall(text)


def endings(text: str) -> Counter[str]:
    """Count sentences by their last mark, after which quotation marks and brackets may close."""
    return Counter(sentence.rstrip(_CLOSING)[-1:] for sentence in split_sentences(text))


def punctuation_cover(text: str) -> bool:
    """Each of `.,!?;:` occurs, and the interrobang besides."""
    interrobang = next((mark for mark in ("?!", "!?", "‽") if mark in text), None)
    return interrobang is not None and set(".,!?;:") <= set(text.replace(interrobang, "", 3))


def every_nth_japanese(text: str, *, N: float) -> bool:
    """Every Nth word is in Japanese, or a number."""
    words = (word.strip(string.punctuation) for word in text.split()[int(N) - 1 :: int(N)])
    return all(not word or word.isdigit() or _JAPANESE.search(word) for word in words)


def keywords_multiple(
    text: str, *, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    """The keywords occur once, twice, three, five and seven times."""
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True)
    return all(text.lower().count(keyword.strip().lower()) == count for keyword, count in wanted)


def sentence_type(text: str) -> bool:
    """There are twice as many declarative sentences as interrogative ones, and there are some."""
    found = endings(text)
    return 0 < found["."] == 2 * found["?"]


def sentence_balance(text: str) -> bool:
    """There are as many declarative, interrogative and exclamatory sentences, and there are some."""
    found = endings(text)
    return 0 < found["."] == found["?"] == found["!"]


def trigram_overlap(text: str, *, reference_text: str, percentage: float) -> bool:
    """So many percent of the different trigrams of characters are in the reference text, or almost."""
    found, reference = ({one[n : n + 3] for n in range(len(one) - 2)} for one in (text, reference_text))
    shared = len(found & reference)
    return bool(found) and abs(100 * shared / len(found) - percentage) <= OVERLAP_TOLERANCE


def stop_words(text: str, *, percentage: float) -> bool:
    """At most so many percent of the words are stop words, and there are words."""
    words = _WORD.findall(text.lower())
    return bool(words) and 100 * sum(word in STOP_WORDS for word in words) <= percentage * len(words)


def equally_long_sentences(text: str) -> bool:
    """There are three sentences with the same number of characters."""
    lengths = [len(sentence) for sentence in split_sentences(text)]
    return len(lengths) == 3 and len(set(lengths)) == 1


def alphabet_loop(text: str) -> bool:
    """Each word begins with the letter after that of the word before, and with a after z."""
    letters = [string.ascii_lowercase.find(word[0]) for word in bare_words(text)]
    return -1 not in letters and bool(letters) and all((a + 1) % 26 == b for a, b in pairwise(letters))


def starts_with_verb(text: str) -> bool:
    """The first word is a verb, as NLTK's tagger has it."""
    sentences = map(_package("nltk.tokenize").NLTKWordTokenizer().tokenize, split_sentences(text))
    # The tag of the first word depends on the two that follow, and on no others.
    first = list(islice(chain.from_iterable(sentences), 3))
    return bool(first) and "VB" in _tagger().tag(first)[0][1]


class _Tagger(Protocol):
    def tag(self, tokens: list[str]) -> list[tuple[str, str]]:
        """Return each token with its tag."""


@cache
def _tagger() -> _Tagger:
    """Load NLTK's tagger. Its data are no part of the package `nltk`."""
    try:
        tagger: _Tagger = _package("nltk.tag.perceptron").PerceptronTagger(lang="eng")
    except LookupError as error:
        raise ValueError(
            "it needs the data of NLTK's tagger: python -m nltk.downloader averaged_perceptron_tagger_eng"
        ) from error
    return tagger


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        needed = name.partition(".")[0]
        raise ValueError(f"it needs {needed}: pip install 'sluice-rl[ifbench]'") from error


def alternating_syllables(text: str) -> bool:
    """Words with an odd and with an even number of syllables alternate."""
    syllapy = _package("syllapy")
    return all(a != b for a, b in pairwise(syllapy.count(word) % 2 for word in bare_words(text)))


def last_word_first(text: str) -> bool:
    """Each sentence begins with the last word of the sentence before."""
    words = [stripped_words(sentence) for sentence in split_sentences(text)]
    return all(a and b and a[-1] == b[0] for a, b in pairwise(words))


def second_and_last_but_one(text: str, *, keyword: str) -> bool:
    """The keyword is the second, and the last but one, of words and marks of punctuation."""
    found = tokens(text)
    return len(found) > 1 and found[1] == found[-2] == keyword.strip()


def keyword_at(text: str, *, keyword: str, n: float, m: float) -> bool:
    """The keyword is the mth of words and marks of punctuation in the nth sentence."""
    found = _nth(tokens(_nth(split_sentences(text), n)), m)
    return found == keyword.strip()


def increasing_alliteration(text: str) -> bool:
    """Each sentence has more words that alliterate with a neighbour than the sentence before."""
    counts = [_alliterating(sentence) for sentence in split_sentences(text)]
    return all(a < b for a, b in pairwise(counts))


def increasing_sentences(text: str, *, small_n: float) -> bool:
    """Each sentence has exactly so many more words than the sentence before."""
    counts = [len(bare_words(sentence)) for sentence in split_sentences(text)]
    return all(a + small_n == b for a, b in pairwise(counts))


def _alliterating(sentence: str) -> int:
    words = (word.lstrip(string.punctuation) for word in sentence.lower().split())
    runs = (sum(1 for _ in run) for _, run in groupby(word[0] for word in words if word))
    return sum(length for length in runs if length > 1)


def _nth(parts: Iterable[str], n: float) -> str:
    """Return the nth part, from 1; nothing where there is none."""
    found = list(parts)
    return found[int(n) - 1] if 1 <= n <= len(found) else ""


WORD_CHECKS: Mapping[str, Callable[..., bool]] = {
    "count:conjunctions": lambda text, *, small_n: (
        len(CONJUNCTIONS.intersection(stripped_words(text))) >= small_n
    ),
    "count:keywords_multiple": keywords_multiple,
    "count:numbers": lambda text, *, N: len(re.findall(r"\d+", text.translate(_WITHOUT_PUNCTUATION))) == N,
    "count:person_names": lambda text, *, N: len(NAMES.intersection(_WORD.findall(text))) >= N,
    "count:pronouns": lambda text, *, N: (
        sum(word in PRONOUNS for word in bare_words(text.replace("/", " "))) >= N
    ),
    "count:punctuation": punctuation_cover,
    "count:unique_word_count": lambda text, *, N: len(set(stripped_words(text))) >= N,
    "count:word_count_range": lambda text, *, min_words, max_words: (
        min_words <= sum(1 for _ in _WORD.finditer(text)) <= max_words
    ),
    "count:words_japanese": every_nth_japanese,
    "ratio:overlap": trigram_overlap,
    "ratio:sentence_balance": sentence_balance,
    "ratio:sentence_type": sentence_type,
    "ratio:sentence_words": equally_long_sentences,
    "ratio:stop_words": stop_words,
    "sentence:alliteration_increment": increasing_alliteration,
    "sentence:increment": increasing_sentences,
    "sentence:keyword": lambda text, *, word, N: word.lower() in _nth(split_sentences(text), N).lower(),
    "words:alphabet": alphabet_loop,
    "words:consonants": lambda text: all(map(_CLUSTER.search, text.lower().split())),
    "words:keywords_specific_position": keyword_at,
    "words:last_first": last_word_first,
    "words:no_consecutive": lambda text: all(a[0] != b[0] for a, b in pairwise(bare_words(text))),
    "words:odd_even_syllables": alternating_syllables,
    "words:palindrome": lambda text: (
        sum(len(word) >= 5 and word == word[::-1] for word in bare_words(text)) >= 10
    ),
    "words:paragraph_last_first": lambda text: all(
        words[0] == words[-1] for words in map(stripped_words, text.split("\n")) if words
    ),
    "words:prime_lengths": lambda text: all(len(word) in PRIMES for word in bare_words(text)),
    "words:repeats": lambda text, *, small_n: max(Counter(bare_words(text)).values(), default=0) <= small_n,
    "words:start_verb": starts_with_verb,
    "words:vowel": lambda text: (
        "\n" not in text.strip() and len(set("aeiou").intersection(text.lower())) <= 3
    ),
    "words:words_position": second_and_last_but_one,
}
"""IFBench's names and arguments."""
