"""Reads the training prompts of a run, or takes what was read before where no file has changed since."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bus.codec import Json
from bus.errors import StorageError
from storage.disk.atomic_files import write_json
from storage.prompt_files.dataset import each_prompt
from storage.prompt_files.rows import files_of
from storage.prompt_files.stored_prompts import StoredPrompts, open_stored, stamp_of, store_prompts
from storage.prompts.mixture import PromptSource
from storage.prompts.sources import load_sources
from storage.settings.data import PromptKeys, SourceConfig

READING_VERSION = 2
"""Version of how files become prompts; raise it when the same files give others, or are refused."""


def training_prompts(
    where: Path | Sequence[SourceConfig], keys: PromptKeys, directory: Path
) -> tuple[StoredPrompts, tuple[PromptSource, ...]]:
    """Return the prompts of a file or of several sources, stored in `directory`, and each source's part.

    A file `prompts-read.json` there notes what was read and how the files looked, those of images among them,
    by size, times and inode: where these are the same, nothing is read. Raises `ConfigError` for whatever is
    wrong with the files."""
    asked = _asked(where, keys)
    paths = [where] if isinstance(where, Path) else [one.prompts for one in where]
    files: dict[str, Json] = {
        str(file.resolve()): list(stamp_of(file)) for path in paths for file in files_of(path)
    }
    images: set[Path] = set()
    noted = directory / "prompts-read.json"
    if (known := _known(noted, {"asked": asked, "files": files}, directory)) is not None:
        return known
    sources: tuple[PromptSource, ...] = ()
    if isinstance(where, Path):
        stored = store_prompts(each_prompt(where, keys, images), directory)
    else:
        stored, sources = load_sources(where, keys, directory, images)
    parts: list[Json] = [asdict(one) for one in sources]
    shown: dict[str, Json] = {str(file.resolve()): list(stamp_of(file)) for file in sorted(images)}
    read: dict[str, Json] = {"asked": asked, "files": files, "images": shown}
    write_json(noted, {**read, "digest": stored.digest, "sources": parts})
    return stored, sources


def _asked(where: Path | Sequence[SourceConfig], keys: PromptKeys) -> Json:
    what: Json = str(where) if isinstance(where, Path) else [one.model_dump(mode="json") for one in where]
    return {"version": READING_VERSION, "what": what, "keys": keys.model_dump()}


def _known(
    noted: Path, now: dict[str, Json], directory: Path
) -> tuple[StoredPrompts, tuple[PromptSource, ...]] | None:
    """Return what was read before; None if it was something else, or is no longer there."""
    try:
        before = json.loads(noted.read_text())
        if {name: before[name] for name in now} != now:
            return None
        if any(list(stamp_of(Path(image))) != stamp for image, stamp in before["images"].items()):
            return None
        stored = open_stored(directory, before["digest"], source=str(noted))
        return stored, tuple(PromptSource(**one) for one in before["sources"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, StorageError):
        return None  # it is read again
