"""Tools that Anthropic's models know by their types, and that clients carry out."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from actors.episodes.task import JSON

DATED = re.compile(r"(.+)_\d{8}")
PATH = {"path": {"type": "string"}}
LINE = {"type": "integer"}
EDITS: Mapping[str, JSON] = {
    **PATH,
    "file_text": {"type": "string"},
    "old_str": {"type": "string"},
    "new_str": {"type": "string"},
    "insert_line": LINE,
    "insert_text": {"type": "string"},
    "view_range": {"type": "array", "items": LINE, "description": "first and last line"},
}


def _schema(properties: Mapping[str, JSON], *required: str) -> Mapping[str, JSON]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _command(*names: str) -> Mapping[str, JSON]:
    return {"command": {"type": "string", "enum": list(names)}}


CLIENT_SIDE: Mapping[str, tuple[str, Mapping[str, JSON]]] = MappingProxyType({
    "bash": (
        "Runs a command in a shell that keeps its state, or starts the shell anew.",
        _schema({"command": {"type": "string"}, "restart": {"type": "boolean"}}),
    ),
    "text_editor": (
        "Views, creates and edits files.",
        _schema(
            {**_command("view", "create", "str_replace", "insert", "undo_edit"), **EDITS}, "command", "path"
        ),
    ),
    "memory": (
        "Keeps notes in files below /memories.",
        _schema(
            {
                **_command("view", "create", "str_replace", "insert", "delete", "rename"),
                **EDITS,
                "old_path": {"type": "string"},
                "new_path": {"type": "string"},
            },
            "command",
        ),
    ),
})  # fmt: skip
"""What they do and their parameters, by the type without its date: clients send neither."""


def client_side(kind: str) -> tuple[str, Mapping[str, JSON]] | None:
    """Return what a tool of such a type does and its parameters; None where clients do not carry it out."""
    dated = DATED.fullmatch(kind)
    return CLIENT_SIDE.get(dated[1]) if dated else None
