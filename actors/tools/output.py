"""Text of tools as a model reads it: valid, and never longer than a limit."""


def shortened(text: str, limit: int) -> str:
    """Return at most `limit` characters of `text`: its first half and its last, with a note between them.

    The note comes on top of `limit`."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    tail = text[len(text) - (limit - head) :]
    return f"{text[:head]}\n[{len(text) - limit} characters left out]\n{tail}"


def decoded(data: bytes) -> str:
    """Return bytes as text; what is no UTF-8 becomes U+FFFD, and NUL goes, which no template expects."""
    return data.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
