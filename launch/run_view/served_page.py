"""The address of a dashboard that shows the runs of a directory, for screens that name it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from storage.disk.atomic_files import try_lock
from storage.disk.file_users import processes_holding

NOTE = ".dashboard.json"
"""File of a directory of runs which a dashboard holds open while it serves."""


@contextmanager
def noted_page(directory: Path, url: str) -> Iterator[None]:
    """Let others know the address of the page while inside, where this user may write in the directory and no
    other dashboard shows it."""
    try:
        file = (directory / NOTE).open("a")
    except OSError:  # the page is there all the same
        yield
        return
    with file:
        if try_lock(file):
            file.truncate(0)
            file.write(json.dumps({"url": url}))
            file.flush()
        yield


def page_of(directory: Path, run: str) -> str | None:
    """Return the address that opens a run in a dashboard of this host, if one shows the directory."""
    path = directory / NOTE
    try:
        url = json.loads(path.read_text())["url"]
    except (OSError, ValueError, KeyError, TypeError):  # none was, or its host went while it wrote
        return None
    return f"{url}/#/runs/{quote(run)}" if processes_holding([path])[path] else None
