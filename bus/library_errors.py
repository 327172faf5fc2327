"""Errors of libraries that only their text tells apart, since the libraries have no type or code for them.

No other code asks for the text of an error. Tests have the installed version of each library raise it."""

import re

LOGIN_REFUSED = "authorization violation"
"""nats-py, while it connects, raises a plain `Error` with the sentence of the server."""
RANK_LOST = "gloo/"
"""gloo raises a plain `RuntimeError`, whose text begins with the path of the source that raised it."""
FILE_NOT_WRITTEN = ("inline_container.cc", "basic_ios::clear")
"""torch says one of them when it writes a file by itself and cannot, of a small one the latter; it does not
say why."""
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
"""How libraries in Rust, and texts of Python's own, give the number of the system's error."""


def tells(error: BaseException, part: str) -> bool:
    """Return whether the text of an error has this part, in whatever case.

    SGLang says which adapter it lacks by naming it in a sentence, with the status of any bad request."""
    return part.lower() in str(error).lower()


def system_errors(error: BaseException) -> list[int]:
    """Return the numbers of the system's errors that the text of an error gives."""
    return [int(one or other) for one, other in _SYSTEM_ERROR.findall(str(error))]
