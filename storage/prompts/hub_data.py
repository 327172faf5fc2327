"""Finds a data set by its name on the Hugging Face hub, and keeps it in that library's cache."""

import re
from functools import cache
from pathlib import Path

import structlog

from bus.errors import ConfigError

log = structlog.get_logger()
NAME = re.compile(r"hf:/+(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w.-]+))?(?P<rest>(/.*)?)")
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
    from huggingface_hub import snapshot_download

    found = NAME.fullmatch(str(path))
    if found is None:
        raise ConfigError(f"{path}: write a data set of the hub as hf://ORGANISATION/NAME[@REVISION][/SPLIT]")
    try:
        snapshot = snapshot_download(
            found["repo"],
            repo_type="dataset",
            revision=_commit_here(found["repo"], found["revision"]) or found["revision"],
            allow_patterns=_wanted(found["rest"]),
        )
    except (http_error(), OSError, ValueError) as error:  # OSError: no network, or no room
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"hf://{found['repo']}: the Hugging Face hub does not give this data set ({reason}): check its "
            "name and the network, or give a file or directory that is here (a gated one needs HF_TOKEN)"
        ) from error
    log.info("hub_data_found", name=found["repo"], commit=Path(snapshot).name)
    return Path(snapshot, found["rest"].strip("/"))


def http_error() -> type[Exception]:
    """Return what the hub's client raises for answers and broken connections alike: the base of its own
    error is of the HTTP library, which is another one from version to version."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def _commit_here(repo: str, revision: str | None) -> str | None:
    """Return the commit at which this host's cache has a data set; None where it has none of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        here = snapshot_download(repo, repo_type="dataset", revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(here).name


def _wanted(rest: str) -> list[str]:
    """Return the patterns of the files to fetch: those below a directory or of a split, if one is named."""
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
