"""Texts in nats-server's configuration file."""

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def quoted(text: str) -> str:
    """Return a text as nats-server's configuration has it: in quotes, with its escapes.

    JSON's escapes are others: nats-server refuses `\\u00e9`, and reads letters beyond ASCII as they are."""
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character < " " or character == "\x7f":
        return _ESCAPES.get(character, f"\\x{ord(character):02x}")
    return _ESCAPES.get(character, character)
