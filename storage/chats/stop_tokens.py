"""The tokens that end an answer, as a model's files, its tokenizer and its chat template name them.

Everybody who stops asks here: engines, evaluation, the gateway, demonstrations, and what a start shows."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from bus.errors import ConfigError
from storage.chats.template import (
    PROBE_TOOL,
    QUESTION,
    STAND_IN,
    TOOL_RESULT,
    ChatRefusedError,
    ChatTemplate,
    Message,
    Renders,
    answer_with_calls,
)
from storage.model_files.model_reading import AGAIN

FILES = "generation_config.json", "config.json"
TEMPLATE = "chat template"
ANSWER: Message = {"role": "assistant", "content": STAND_IN}


class AddedToken(Protocol):
    """The part of an added token that is used here."""

    content: str
    special: bool


class RendersTokens(Renders, Protocol):
    """The part of a transformers tokenizer that renders chats, and tells special tokens from text."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Return the tokens that were added to the vocabulary, special ones among them."""


class StopTokenizer(RendersTokens, Protocol):
    """The part of a transformers tokenizer that is used here."""

    eos_token_id: int | None

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens."""

    def __len__(self) -> int:
        """Return the number of tokens in the vocabulary."""


class StopToken(NamedTuple):
    """A token that ends an answer."""

    number: int
    text: str
    named_by: tuple[str, ...]
    """What says that the token ends answers: files of the model, "tokenizer", "chat template"."""

    def __str__(self) -> str:
        return f"{self.text} ({self.number}: {', '.join(self.named_by)})"


class TurnEnds(NamedTuple):
    """Special tokens by which a chat template ends turns of the assistant; None where it writes none."""

    last: int | None
    """Behind the answer with which a chat ends, as the model has learned to end it."""
    history: int | None
    """Behind an answer that others follow; gpt-oss has <|end|> there and <|return|> behind the last one."""
    calls: int | None
    """Behind an answer that consists of tool calls, where it is another one."""
    begins_next: tuple[int, ...] = ()
    """Tokens that begin the turn of a user or a tool: they end an answer where `last` is None."""

    @property
    def all(self) -> tuple[int, ...]:
        ends = (self.last, self.calls) if self.last is not None else (self.calls, *self.begins_next)
        return tuple(number for number in ends if number is not None)


def stop_tokens(model: Path, tokenizer: StopTokenizer) -> tuple[StopToken, ...]:
    """Return every token that ends an answer, in the order of their numbers. Raises `ConfigError` where none
    is named, or a file names what is no token."""
    found: dict[int, list[str]] = {}
    for source, numbers in _named(model, tokenizer):
        for number in numbers:
            found.setdefault(number, []).append(source)
    if not found:
        raise ConfigError(
            f"{model}: nothing names a token that ends an answer: neither generation_config.json nor "
            "config.json (eos_token_id), nor the tokenizer (eos_token), nor its chat template by what it "
            "writes behind an answer; add eos_token_id to generation_config.json"
        )
    return tuple(
        StopToken(number, tokenizer.decode([number]), tuple(sources))
        for number, sources in sorted(found.items())
    )


def stop_token_ids(model: Path, tokenizer: StopTokenizer) -> tuple[int, ...]:
    """Return the numbers of `stop_tokens`. Raises as it does."""
    return tuple(token.number for token in stop_tokens(model, tokenizer))


def answer_end(tokenizer: StopTokenizer) -> int:
    """Return the token by which a demonstration ends. Raises `ConfigError` if there is none."""
    ends = turn_ends(tokenizer)
    for number in (ends.last, *ends.begins_next, tokenizer.eos_token_id):
        if number is not None:
            return number
    raise ConfigError(
        "neither the chat template nor the tokenizer names a token that ends an answer: add eos_token to "
        "tokenizer_config.json"
    )


def answer_start(tokenizer: Renders) -> str:
    """Return what the chat template writes between the place where an answer begins and the answer's text.

    That is gpt-oss's `<|channel|>final<|message|>` and Qwen3's empty thought, and mostly nothing. A template
    that writes an answer in a chat otherwise than it has it begin gives nothing, too."""
    template = ChatTemplate(tokenizer)
    try:
        begun = template.render([QUESTION])
        answered = template.render([QUESTION, ANSWER], go_on=False)
    except ChatRefusedError:
        return ""
    before, found, _ = answered.rpartition(STAND_IN)
    return before.removeprefix(begun) if found and before.startswith(begun) else ""


def with_start(response: str, start: str) -> str:
    """Return a response behind what `answer_start` returned, unless it has its own."""
    own = response.lstrip()
    begins_so = any(own.startswith(mark) for mark in re.findall(r"^\s*(<[^<>]+>)", start))
    return response if begins_so else start + response


def turn_ends(tokenizer: RendersTokens) -> TurnEnds:
    """Return the special tokens that the chat template writes behind an answer, found by rendering some."""
    template, marks = ChatTemplate(tokenizer), _Marks(tokenizer)
    users_end = marks.first(_behind(template, [{**QUESTION, "content": STAND_IN}, ANSWER], place=0))
    last = _end(marks, _behind(template, [QUESTION, ANSWER]), users_end)
    followed = _behind(template, [QUESTION, ANSWER, QUESTION])
    calls = _end_of_calls(template, marks, last, users_end)
    if last is not None:
        return TurnEnds(last, last if last in marks.all(followed) else marks.first(followed), calls)
    after_call = _behind(template, [QUESTION, answer_with_calls(1), TOOL_RESULT])
    begun = (marks.first(text) for text in (followed, after_call))
    return TurnEnds(None, None, calls, tuple({number: None for number in begun if number is not None}))


def _named(model: Path, tokenizer: StopTokenizer) -> Iterable[tuple[str, Sequence[int]]]:
    vocabulary = max(len(tokenizer), _vocabulary(_read(model / "config.json")))
    for name in FILES:
        yield name, _end_tokens(model / name, vocabulary)
    yield "tokenizer", () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    if tokenizer.chat_template:
        yield TEMPLATE, turn_ends(tokenizer).all


def _read(path: Path) -> Mapping[str, object]:
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}: {AGAIN}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is {type(found).__name__} and no JSON object: {AGAIN}")
    return found


def _text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _vocabulary(config: Mapping[str, object]) -> int:
    size = _text_part(config).get("vocab_size")
    return size if isinstance(size, int) else 0


def _end_tokens(path: Path, vocabulary: int) -> Sequence[int]:
    """Return the end tokens that a file names as one number or several. Raises `ConfigError`."""
    config = _read(path)
    named = config.get("eos_token_id", _text_part(config).get("eos_token_id"))
    numbers: list[int] = []
    for number in named if isinstance(named, list) else [] if named is None else [named]:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < vocabulary:
            raise ConfigError(
                f"{path}: eos_token_id={named!r} has {number!r}, which is no token of a vocabulary of "
                f"{vocabulary}: take the file of this model, or correct it"
            )
        numbers.append(number)
    return numbers


class _Marks:
    """The special tokens of a tokenizer in text."""

    def __init__(self, tokenizer: RendersTokens) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self._numbers = {token.content: number for number, token in added if token.special}
        longest_first = sorted(self._numbers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def all(self, text: str) -> list[int]:
        return [self._numbers[found] for found in self._pattern.findall(text)]

    def first(self, text: str) -> int | None:
        return next(iter(self.all(text)), None)


def _behind(template: ChatTemplate, chat: Sequence[Message], *, place: int | None = None) -> str:
    """Return what the template writes behind the last stand-in of a chat, or behind its first one if `place`
    is 0; nothing where it refuses the chat or leaves the stand-in out."""
    tools = [PROBE_TOOL] if any(message.get("tool_calls") for message in chat) else []
    try:
        text = template.render(chat, tools, go_on=False)
    except ChatRefusedError:
        return ""
    _, found, behind = text.partition(STAND_IN) if place == 0 else text.rpartition(STAND_IN)
    return behind if found else ""


def _end(marks: _Marks, behind: str, users_end: int | None) -> int | None:
    """Return the token that ends a turn: that which ends a user's turn, too, if it is there, else the first.
    Command writes <|END_RESPONSE|> before it."""
    found = marks.all(behind)
    return users_end if users_end in found else next(iter(found), None)


def _end_of_calls(
    template: ChatTemplate, marks: _Marks, last: int | None, users_end: int | None
) -> int | None:
    """Return the token that ends an answer of calls, unless it is that of other answers. It is the last one
    that is written behind all calls and not between two of them."""
    found = marks.all(_behind(template, [QUESTION, answer_with_calls(1)]))
    if last in found or users_end in found:
        return None
    try:
        both = template.render([QUESTION, answer_with_calls(2)], [PROBE_TOOL], go_on=False)
    except ChatRefusedError:
        both = ""
    _, _, rest = both.partition(f"{STAND_IN}0")
    between, two, _ = rest.partition(f"{STAND_IN}1")
    inside = marks.all(between) if two else []
    outside = [number for number in found if number not in inside]
    return outside[-1] if outside else None
