"""Reads the prompts of a run: those it trains on, and those it measures with.

Training prompts that were read before are taken from the run's directory where no file has changed since."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bus.codec import Json
from bus.errors import ConfigError, StorageError
from bus.messages import Prompt
from bus.process.plugins import names_function
from storage.built_in_tasks.generators import generate_task
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from storage.prompt_files.dataset import each_prompt, load_prompts
from storage.prompt_files.rows import files_of
from storage.prompt_files.stored_prompts import StoredPrompts, open_stored, stamp_of, store_prompts
from storage.prompts.order import PromptSource
from storage.prompts.sampler import load_sampler
from storage.prompts.sources import load_sources, with_choices
from storage.prompts.stream import first_block
from storage.settings.data import DataConfig, PromptKeys, SourceConfig
from storage.settings.evaluation import EvaluationSetConfig

READING_VERSION = 2
"""Version of how files become prompts; raise it when the same files give others, or are refused."""
UNASKED = "no file: the run trains on demonstrations alone"
"""Where the prompts of a run without rollouts are from: one, which nobody asks, stands for them."""


@dataclass(frozen=True)
class Prompts:
    """What a run trains on and measures with."""

    training: StoredPrompts
    heldout: list[Prompt]
    source: str
    """Where the training prompts come from, for a human."""
    sources: tuple[PromptSource, ...] = ()
    """Sources that are mixed, whose prompts follow one another in `training`."""
    sets: dict[str, list[Prompt]] = field(default_factory=dict)
    """Further held-out prompts, by the name of their data set."""

    @property
    def measured(self) -> dict[str, list[Prompt]]:
        """Return all held-out prompts, by what a human calls them."""
        named = {f"evaluation.sets {name!r}": found for name, found in self.sets.items()}
        return {"held-out prompts": self.heldout, **named}


def read_prompts(
    data: DataConfig, run: RunDirectory, seed: int, evaluation_sets: Iterable[EvaluationSetConfig] = (), *,
    trained_on: bool = True,
) -> Prompts:  # fmt: skip
    """Read the prompt files, writing them first where the configuration names a task instead.

    A run that is not `trained_on` prompts, but on demonstrations alone, need not have any: one that says so
    stands for them.

    Those to train on are copied into `run` and stay on disk. Raises `ConfigError` for whatever is wrong
    with them; a run that is new leaves nothing then."""
    load_sampler(data.sampler)
    with run.unmade_on_error():
        return _read_prompts(data, run, seed, evaluation_sets, trained_on)


def _read_prompts(
    data: DataConfig, run: RunDirectory, seed: int, evaluation_sets: Iterable[EvaluationSetConfig],
    trained_on: bool,
) -> Prompts:  # fmt: skip
    training, heldout = data.prompts, data.heldout
    if training is None and data.task is not None and not data.sources:
        files = generate_task(data.task, run.data, seed=seed)
        training, heldout = files.prompts, heldout or files.heldout
    without = training is None and not data.sources
    if without and trained_on:
        raise ConfigError(
            "no prompts: give --prompts FILE, data.sources, or --data.task sort for a generated task"
        )
    measured = load_prompts(heldout, data.keys) if heldout else []
    sets = {
        one.name: list(with_choices(each_prompt(one.prompts, data.keys), one.reward, one.environment))
        for one in evaluation_sets
    }
    if without:
        return Prompts(store_prompts([Prompt(content="-")], run.data), measured, UNASKED, (), sets)
    stored, sources = training_prompts(training or data.sources, data.keys, run.data)  # takes longest
    names = str(training) if training else " and ".join(str(one.prompts) for one in data.sources)
    return Prompts(stored, measured, names, sources, sets)


def training_prompts(
    where: Path | Sequence[SourceConfig], keys: PromptKeys, directory: Path
) -> tuple[StoredPrompts, tuple[PromptSource, ...]]:
    """Return the prompts of a file or of several sources, stored in `directory`, and each source's part.

    A file `prompts-read.json` there notes what was read and how the files looked, those of images among them,
    by size, times and inode: where these are the same, nothing is read. Raises `ConfigError` for whatever is
    wrong with the files.

    Of a function that may have no end these are its first prompts: `PromptStream` reads on."""
    asked = _asked(where, keys)
    paths = [where] if isinstance(where, Path) else [one.prompts for one in where]
    is_stream = isinstance(where, Path) and names_function(where)
    own = [path for path in paths if names_function(str(path).partition("@[")[0])]
    files: dict[str, Json] = {
        str(file.resolve()): list(stamp_of(file)) for path in paths for file in files_of(path)
    }
    images: set[Path] = set()
    noted = directory / "prompts-read.json"
    known = _known(noted, {"asked": asked, "files": files}, directory)
    if known is not None and (is_stream or not own):  # a function that ends may yield other rows now
        return known
    sources: tuple[PromptSource, ...] = ()
    if isinstance(where, Path):
        read = first_block(where, keys) if is_stream else each_prompt(where, keys, images)
        stored = store_prompts(read, directory)
    else:
        stored, sources = load_sources(where, keys, directory, images)
    parts: list[Json] = [asdict(one) for one in sources]
    shown: dict[str, Json] = {str(file.resolve()): list(stamp_of(file)) for file in sorted(images)}
    seen: dict[str, Json] = {"asked": asked, "files": files, "images": shown}
    write_json(noted, {**seen, "digest": stored.digest, "sources": parts})
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
        return None  # the source is read again
