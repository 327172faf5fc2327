"""Reads pairs of answers to a prompt, of which one is preferred."""

from pathlib import Path

from bus.codec import Json
from bus.errors import ConfigError
from bus.messages import Prompt
from storage.prompt_files.dataset import is_trained, prompt_content, tool_schemas
from storage.prompt_files.rows import Row, read_rows

SIDES = ("chosen", "rejected")


def load_pairs(path: Path) -> list[tuple[Prompt, str]]:
    """Read pairs from a .jsonl or .parquet file: two demonstrations a row, the preferred one first.

    `chosen` and `rejected` are texts or messages that answer `prompt`, a text or a chat that may also be
    named `messages`; or they are whole chats, whose common beginning is the prompt. Answers of the prompt are
    not trained. Raises `ConfigError` naming the line or row, what is wrong and what to do."""
    return [(prompt, "") for row in read_rows(path) for prompt in _pair(row)]


def _pair(row: Row) -> list[Prompt]:
    tools = tool_schemas(row.values.get("tools"), f"{row.where}: 'tools'")
    answers = [_messages(row, key, "assistant") for key in SIDES]
    whole = [_role(answer[0]) != "assistant" for answer in answers]
    if any(whole) and not all(whole):
        raise ConfigError(
            f"{row.where}: {SIDES[whole.index(True)]!r} is a whole chat, {SIDES[whole.index(False)]!r} the "
            "answer alone: give both as whole chats, or both as answers to 'prompt'"
        )
    if all(whole):
        shorter = min(map(len, answers))
        same = (n for n in range(shorter) if n == shorter - 1 or answers[0][n] != answers[1][n])
        begun = next(same)
        if answers[0][0] != answers[1][0]:
            raise ConfigError(
                f"{row.where}: the chats 'chosen' and 'rejected' begin with other messages, and are no "
                "answers to one prompt: give both the same prompt, or remove the row"
            )
        asked, answers = answers[0][:begun], [answer[begun:] for answer in answers]
    else:
        asked = _messages(row, "messages" if "messages" in row.values else "prompt", "user")
    for key, answer in zip(SIDES, answers, strict=True):
        if not any(map(is_trained, answer)):
            raise ConfigError(
                f"{row.where}: {key!r} has no message with the role 'assistant' behind the prompt, or with a "
                "weight of 0 alone: add the answer"
            )
    known = [{**one, "weight": 0} if isinstance(one, dict) else one for one in asked]
    return [Prompt(content=[*known, *answer], tools=tools) for answer in answers]


def _messages(row: Row, key: str, role: str) -> list[Json]:
    content = row.required(key)
    if isinstance(content, str) and content.strip():
        return [{"role": role, "content": content}]
    found = prompt_content(row, key)
    assert isinstance(found, list), "an empty text was refused"
    return found


def _role(message: Json) -> Json:
    return message.get("role") if isinstance(message, dict) else None
