"""Finds a model by its name on the Hugging Face hub, and keeps it in that library's cache."""

import re
from pathlib import Path

from bus.errors import ConfigError

NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What a model directory needs: configuration, weights, tokenizer and chat template."""
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
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return _snapshot(path, local_files_only=False)
    except (HfHubHTTPError, OSError, ValueError) as error:  # OSError: no network, or no room
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


def _snapshot(path: Path, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    found = NAME.fullmatch(str(path))
    assert found is not None, path
    directory = snapshot_download(
        found["repo"],
        revision=found["revision"],
        allow_patterns=list(FILES),
        ignore_patterns=["*/*"],  # other formats of the same weights lie in subdirectories
        local_files_only=local_files_only,
    )
    return Path(directory)
