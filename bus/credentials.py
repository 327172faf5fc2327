"""Credentials in URLs of the bus never get into logs, errors or files."""

import re

_CREDENTIALS = re.compile(r"(?<=://)[^/,\s]+(?=@)")


def without_credentials(text: str) -> str:
    """Replace user, password or token by `***` in every URL of `text`."""
    return _CREDENTIALS.sub("***", text)
