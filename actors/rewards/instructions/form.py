"""Instructions about the form of an answer, each a function from a text to whether it follows."""

import json
import re

from actors.rewards.instructions.words import holds

_FENCE = re.compile(r"\A```(?:json)?+(.*)```\Z", re.DOTALL | re.IGNORECASE)
_BULLET = re.compile(r"^[^\S\n]*+(?:\*(?!\*)|-(?!-)|[+•])\s*+\S.*$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*")
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
RESPONSES = "******"
"""What separates two answers."""


def is_json(text: str) -> bool:
    """The whole text is JSON, in a fenced block or not."""
    text = text.strip()
    fenced = _FENCE.match(text)
    try:
        json.loads(fenced[1].strip() if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    """There is a title in double angular brackets, <<so>>."""
    return any(title.strip() for title in re.findall(r"<<([^<>\n]+)>>", text))


def number_of_bullets(text: str, *, num_bullets: int) -> bool:
    """Exactly so many lines are bullet points, with `*`, `-`, `+` or `•`."""
    return len(_BULLET.findall(text)) == num_bullets


def number_of_highlights(text: str, *, num_highlights: int) -> bool:
    """At least so many parts are *highlighted* or **so**."""
    found = [single or double for double, single in _HIGHLIGHT.findall(text)]
    return sum(bool(part.strip()) for part in found) >= num_highlights


def number_of_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections begin with the splitter and a number, as `Section 1`."""
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def number_of_placeholders(text: str, *, num_placeholders: int) -> bool:
    """At least so many placeholders are in square brackets, as [address]."""
    return holds(len(re.findall(r"\[[^\[\]]+\]", text)), "at least", num_placeholders)


def has_postscript(text: str, *, postscript_marker: str) -> bool:
    """A line begins with the marker of a postscript, such as `P.S.`; spaces within it do not count."""
    marker = r"\s?".join(re.escape(letter) for letter in postscript_marker if not letter.isspace())
    if not marker:
        raise ValueError("the marker of the postscript is empty")
    return re.search(rf"^[^\S\n]*+{marker}", text, re.IGNORECASE | re.MULTILINE) is not None


def constrained(text: str) -> bool:
    """One of the three allowed answers occurs: `My answer is yes.`, `... no.` or `... maybe.`."""
    return any(allowed in text for allowed in CONSTRAINED)


def two_responses(text: str) -> bool:
    """Two different answers are separated by `******`."""
    parts = [part.strip() for part in text.split(RESPONSES)]
    found = [part for part in parts if part]
    return len(found) == 2 and found[0] != found[1] and all(parts[1:-1])


def repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """The answer begins with the prompt, word for word but for case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(text: str, *, end_phrase: str) -> bool:
    """The answer ends with the phrase; quotation marks around the answer and case do not count."""
    return text.strip().strip('"').strip().lower().endswith(end_phrase.strip().lower())


def is_quoted(text: str) -> bool:
    """The whole answer is in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'
