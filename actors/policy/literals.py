"""Reads values in calls that are written as Python's literals or as Gemma writes them."""

import json
import re
from collections.abc import Callable

from actors.episodes.task import JSON
from actors.policy.reading import NoCallError, past, skip

GEMMA_QUOTE = '<|"|>'
WORDS: dict[str, JSON] = {
    "true": True, "false": False, "null": None, "True": True, "False": False, "None": None,
}  # fmt: skip
WORD = re.compile(r"[A-Za-z_][\w.\-]*")
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
STRING = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\"""", re.DOTALL)
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
FOLLOWS = re.compile(r"\s*(?:[,)\]}:]|$)")
ENDS_ARGUMENT = r"(?=\s*(?:,\s*[A-Za-z_]\w*\s*=|\)\s*(?:[,;]?\s*[A-Za-z_][\w.]*\(|\]|<|$)))"
"""What follows the quote that ends a text which has quotes in it: the next argument or the call's end."""
Reader = Callable[[str, int], tuple[JSON, int]]


def python_value(text: str, at: int) -> tuple[JSON, int]:
    """Read a value at `at`; a text that is no literal, as LFM2 writes some, ends where the argument does.
    Raises `ValueError`."""
    found = STRING.match(text, at)
    if found and FOLLOWS.match(text, found.end()):
        return ESCAPE.sub(_unescaped, found[0][1:-1]), found.end()
    if text[at : at + 1] in ("'", '"'):
        return raw_text(text, at)
    return _value(text, at, python_value)


def raw_value(text: str, at: int) -> tuple[JSON, int]:
    """Read a value at `at`, whose text has no escapes and ends where the argument does."""
    if text[at : at + 1] == "'":
        return raw_text(text, at)
    return _value(text, at, python_value)


def raw_text(text: str, at: int) -> tuple[str, int]:
    """Read a text in quotes that may have such quotes in it, before the end of an argument."""
    closed = re.compile(re.escape(text[at]) + ENDS_ARGUMENT).search(text, at + 1)
    if closed is None:
        raise NoCallError("a text does not end")
    return text[at + 1 : closed.start()], closed.end()


def gemma_value(text: str, at: int) -> tuple[JSON, int]:
    """Read a value at `at` as Gemma 4 writes it: texts stand between <|"|>. Raises `ValueError`."""
    if text.startswith(GEMMA_QUOTE, at):
        begin = at + len(GEMMA_QUOTE)
        end = text.index(GEMMA_QUOTE, begin)
        return text[begin:end], end + len(GEMMA_QUOTE)
    return _value(text, at, gemma_value)


def members(text: str, at: int, read: Reader, *, between: str, closing: str) -> tuple[dict[str, JSON], int]:
    """Read what stands in brackets, from behind the opening one: names, `between`, values, commas. Raises
    `ValueError`."""
    found: dict[str, JSON] = {}
    at = skip(text, at)
    while not text.startswith(closing, at):
        word = WORD.match(text, at)
        if word:
            name, at = word[0], word.end()
        else:
            key, at = read(text, at)
            name = key if isinstance(key, str) else json.dumps(key)
        value, at = read(text, past(text, at, between))
        found[name] = value
        at = skip(text, at)
        if not text.startswith(closing, at):
            at = past(text, at, ",")
    return found, at + len(closing)


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    if code:
        return chr(int(code, 16))
    return ESCAPED.get(found[3], found[3] if found[3] in "'\"\\/" else found[0])


def _value(text: str, at: int, read: Reader) -> tuple[JSON, int]:
    if word := WORD.match(text, at):
        if word[0] not in WORDS:
            raise NoCallError(f"{word[0]!r} is no value")
        return WORDS[word[0]], word.end()
    if number := NUMBER.match(text, at):
        whole = number[0].lstrip("+-").isdigit()
        return int(number[0]) if whole else float(number[0]), number.end()
    if text.startswith("{", at):
        return members(text, at + 1, read, between=":", closing="}")
    if text.startswith("[", at):
        return _list(text, at + 1, read)
    raise NoCallError(f"there is no value at character {at}")


def _list(text: str, at: int, read: Reader) -> tuple[JSON, int]:
    found: list[JSON] = []
    at = skip(text, at)
    while not text.startswith("]", at):
        value, at = read(text, at)
        found.append(value)
        at = skip(text, at)
        if not text.startswith("]", at):
            at = past(text, at, ",")
    return found, at + 1
