"""Finds a data set by its name on the Hugging Face hub, and keeps it in that library's cache."""

import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

import structlog

from bus.errors import ConfigError

log = structlog.get_logger()
NAME = re.compile(r"hf:/+(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w.-]+))?(?P<rest>(/.*)?)")
SNAPSHOT = re.compile(
    r".*/datasets--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})/(?P<inside>.+)"
)
"""Path of a file of a data set in the cache of the hub's library."""
MOST_PATTERNS = 256
"""Patterns of one download: the hub's library compares each with each file of the data set."""
PATTERNS = ("*.parquet", "*.jsonl", "*.arrow")
"""Files that hold rows."""


def is_hub_data(path: Path) -> bool:
    """Return whether a path stands for a data set of the hub, as `hf://openai/gsm8k/main/train`."""
    return str(path).startswith("hf:/")


@cache
def fetched_data(path: Path) -> Path:
    """Return the place in this host's cache of what `path` names, fetching the data set if need be.

    What an earlier call has fetched stays at its commit, so that a run that goes on has the same prompts.
    Raises `ConfigError` when there is none and the hub cannot be reached, or refuses it."""
    found = NAME.fullmatch(str(path))
    if found is None:
        raise ConfigError(f"{path}: write a data set of the hub as hf://ORGANISATION/NAME[@REVISION][/SPLIT]")
    revision = _commit_here(found["repo"], found["revision"]) or found["revision"]
    snapshot = _downloaded(found["repo"], revision, _wanted(found["rest"]))
    log.info("hub_data_found", name=found["repo"], commit=snapshot.name)
    return snapshot / found["rest"].strip("/")


def fetch_images(file: Path, *, named: Callable[[], Iterable[Path]] = tuple) -> None:
    """Fetch the file of an image that rows of a data set of the hub name, if it is one and not here yet.

    With it come, in one download, those that `named` returns, which all rows name; and with each file those
    of its kind that lie beside it or below. Raises `ConfigError` when the hub cannot be reached, or refuses
    them."""
    found = _in_snapshot(file)
    if found is None or Path(found.string).exists():
        return
    others = filter(None, map(_in_snapshot, named()))
    here = [other["inside"] for other in others if other["commit"] == found["commit"]]
    patterns = image_patterns([found["inside"], *here])
    _fetch_all(f"{found['owner']}/{found['name']}", found["commit"], patterns)


def _in_snapshot(file: Path) -> re.Match[str] | None:
    return SNAPSHOT.fullmatch(os.path.normpath(file))  # files of a snapshot are links, its directories none


def image_patterns(files: Iterable[str]) -> tuple[str, ...]:
    """Return patterns of images, by their paths in a data set, and of all files of their kind beside them or
    below; of directories above where those would be more than `MOST_PATTERNS`."""
    paths = [PurePosixPath(file) for file in files]
    found = {
        (path.parent, f"*{glob.escape(path.suffix)}" if path.suffix else glob.escape(path.name))
        for path in paths
    }
    if len(found) > MOST_PATTERNS:
        found = {(parent, kind if kind.startswith("*") else "*") for parent, kind in found}
    while len(found) > MOST_PATTERNS and (depth := max(len(parent.parts) for parent, _ in found)):
        found = {(one.parent if len(one.parts) == depth else one, kind) for one, kind in found}
    return tuple(
        sorted(f"{glob.escape(str(parent))}/{kind}" if parent.parts else kind for parent, kind in found)
    )


@cache
def _fetch_all(repo: str, commit: str, patterns: tuple[str, ...]) -> None:
    _downloaded(repo, commit, patterns)
    log.info("hub_images_found", name=repo, files=", ".join(patterns))


def _downloaded(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(
            repo, repo_type="dataset", revision=revision, allow_patterns=list(patterns)
        )
    except (http_error(), OSError, ValueError) as error:  # OSError: no network, or no room
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"hf://{repo}: the Hugging Face hub does not give this data set ({reason}): check its "
            "name and the network, or give a file or directory that is here (a gated one needs HF_TOKEN)"
        ) from error
    return Path(snapshot)


def http_error() -> type[Exception]:
    """Return what the hub's client raises for answers and broken connections alike: the base of its own
    error is of the HTTP library, which is another one from version to version."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def _commit_here(repo: str, revision: str | None) -> str | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        here = snapshot_download(repo, repo_type="dataset", revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(here).name


def _wanted(rest: str) -> list[str]:
    below = rest.strip("/")
    if not below:
        return [*PATTERNS]
    parent, _, split = below.rpartition("/")
    inside = f"{parent}/" if parent else ""
    return [
        pattern
        for kind in PATTERNS
        for pattern in (f"{below}/{kind}", f"{inside}{split}{kind}", f"{inside}data/{split}{kind}", below)
    ]
