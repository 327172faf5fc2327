"""Finds a model by its name on the Hugging Face hub, and keeps it in that library's cache."""

import re
from pathlib import Path

import structlog

from bus.errors import ConfigError
from storage.prompt_files.hub_data import http_error

log = structlog.get_logger()
LOOK_S = 10.0
"""Longest time that the hub may take to say which commit a name is."""
NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What a model directory needs: configuration, weights, tokenizer and chat templates."""
OTHER_FILES = (*(f"*/{ending}" for ending in FILES if ending != "*.jinja"), "consolidated*.safetensors")
"""Other formats of the same weights, which lie in folders, or have Mistral's name for them."""
REMEDY = (
    "give a directory in Hugging Face format, or a name as ORGANISATION/MODEL[@REVISION] where "
    "the hub can be reached (a gated model needs HF_TOKEN)"
)


def is_hub_name(path: Path) -> bool:
    """Return whether a path that is no directory here may be a name such as `Qwen/Qwen3-0.6B@main`."""
    return not path.exists() and NAME.fullmatch(str(path)) is not None


def fetched(path: Path, setting: str) -> Path:
    """Return the directory of the model of the hub that `setting` names, which is fetched first if need be.
    Where the hub cannot be reached, what an earlier call has fetched is taken. Raises `ConfigError` when
    there is none, or the hub refuses it."""
    try:
        return _snapshot(path, local_files_only=False)
    except (http_error(), OSError, ValueError) as error:  # OSError: no network, or no room
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{setting}: {path} is no directory here, and the Hugging Face hub does not give it "
            f"({reason}): {REMEDY}"
        ) from error


def fetched_before(path: Path) -> Path | None:
    """Return the directory of a model of the hub if it is in the cache of this host."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(path, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError):  # the latter for what is no name of the hub
        return None


def newest_commit(path: Path) -> str | None:
    """Return the commit that the hub has for a name now; None where it does not say."""
    from huggingface_hub import HfApi

    found = NAME.fullmatch(str(path))
    assert found is not None, path
    try:
        described = HfApi().model_info(found["repo"], revision=found["revision"], timeout=LOOK_S)
    except (http_error(), OSError, ValueError) as error:
        log.debug("hub_not_asked", model=str(path), reason=str(error))
        return None
    return described.sha


def with_commit(path: Path, commit: str) -> Path:
    """Return the name of the model at a commit, in place of the revision that `path` names."""
    found = NAME.fullmatch(str(path))
    assert found is not None, path
    return Path(f"{found['repo']}@{commit}")


def _snapshot(path: Path, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    found = NAME.fullmatch(str(path))
    assert found is not None, path
    directory = snapshot_download(
        found["repo"],
        revision=found["revision"],
        allow_patterns=list(FILES),
        ignore_patterns=list(OTHER_FILES),
        local_files_only=local_files_only,
    )
    return Path(directory)
