"""Reads the sources of a run's training prompts, and divides them into buckets."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from io import BufferedRandom
from pathlib import Path
from tempfile import TemporaryDirectory

import xxhash

from bus.codec import Json, decode, encode
from bus.errors import ConfigError
from bus.messages import Prompt
from bus.trajectory import SOURCE
from storage.disk.atomic_files import TEMPORARY_PREFIX
from storage.prompt_files.dataset import each_prompt
from storage.prompt_files.stored_prompts import StoredPrompts, identity_of, store_prompts
from storage.prompts.order import PromptSource, shares
from storage.settings.data import PromptKeys, SourceConfig

REWARD_CHOICE, ENVIRONMENT_CHOICE = "reward", "environment"
"""Fields of a prompt's metadata that name the reward of its answers, and where it is rolled out."""
BUCKETS_PREFIX = f"{TEMPORARY_PREFIX}buckets-"
MOST_BUCKETS = 100
"""Values of a field that divides a source; more are a mistake, such as a field that numbers the prompts."""


def load_sources(
    configured: Sequence[SourceConfig], keys: PromptKeys, directory: Path, images: set[Path] | None = None
) -> tuple[StoredPrompts, tuple[PromptSource, ...]]:
    """Store the prompts of all sources in `directory`, one after the other; return each source's part too.

    Files of images that are read for them are added to `images`. Raises `ConfigError` for whatever is wrong
    with the files, the fields or the weights."""
    found: list[PromptSource] = []
    read = (prompt for one in configured for prompt in _read(one, keys, found, directory, images))
    stored = store_prompts(read, directory)
    shares([source.weight for source in found])  # raises for too many sources
    return stored, tuple(found)


def _read(
    configured: SourceConfig,
    keys: PromptKeys,
    found: list[PromptSource],
    directory: Path,
    images: set[Path] | None,
) -> Iterator[Prompt]:
    """Read a source, in the order of its buckets if it has some; note in `found` what was read.

    Buckets are files in `directory` meanwhile, in which no other process stores prompts: they are as large as
    the source, and the system's directory for temporary files may be memory."""
    read = each_prompt(configured.prompts, keys, images)
    prompts = with_choices(read, configured.reward, configured.environment)
    if configured.buckets is None:
        part = _Part()
        for prompt in prompts:
            part.add(prompt)
            yield prompt
        found.append(part.source(configured.name, configured.weight))
        return
    for left in directory.glob(f"{BUCKETS_PREFIX}*"):  # by a process that was killed
        shutil.rmtree(left)
    with TemporaryDirectory(prefix=BUCKETS_PREFIX, dir=directory) as scratch, ExitStack() as opened:
        buckets = _divided(configured, prompts, Path(scratch), opened)
        total = sum(part.count for part, _ in buckets.values())
        for name, (part, file) in sorted(buckets.items()):
            file.seek(0)
            yield from (decode(line, Prompt) for line in _framed(file))
            found.append(part.source(name, configured.weight / total * part.count))


class _Part:
    def __init__(self) -> None:
        self.count = 0
        self._digest = xxhash.xxh3_128()

    def add(self, prompt: Prompt) -> None:
        self.count += 1
        self._digest.update(identity_of(prompt))

    def source(self, name: str, weight: float) -> PromptSource:
        return PromptSource(name, self.count, self._digest.hexdigest(), weight)


def _divided(
    configured: SourceConfig, prompts: Iterable[Prompt], scratch: Path, opened: ExitStack
) -> dict[str, tuple[_Part, BufferedRandom]]:
    """Write the prompts of each bucket to a file of its own, so that none stays in memory."""
    buckets: dict[str, tuple[_Part, BufferedRandom]] = {}
    for number, prompt in enumerate(prompts, 1):
        value = prompt.metadata.get(str(configured.buckets))
        if not isinstance(value, str | int | float):
            raise ConfigError(
                f"{configured.prompts}, prompt {number}: data.sources {configured.name!r} is "
                f"divided by {configured.buckets!r}, which its metadata lack or which is no text and no "
                "number: add it, or leave out buckets"
            )
        name = f"{configured.name}={value}"
        if name not in buckets:
            if len(buckets) == MOST_BUCKETS:
                raise ConfigError(
                    f"{configured.prompts}: {configured.buckets!r} has more than {MOST_BUCKETS} values, of "
                    "which no more can divide a source: choose a field with fewer, such as a level"
                )
            file = opened.enter_context((scratch / str(len(buckets))).open("w+b"))
            buckets[name] = (_Part(), file)
        part, file = buckets[name]
        part.add(prompt)
        encoded = encode(prompt)
        file.write(len(encoded).to_bytes(4) + encoded)
    return buckets


def _framed(file: BufferedRandom) -> Iterator[bytes]:
    while size := file.read(4):
        yield file.read(int.from_bytes(size))


def with_source(prompt: Prompt, name: str) -> Prompt:
    """Return the prompt with the name of its source, unless it names one itself; an empty name changes
    nothing."""
    if not name or SOURCE in prompt.metadata:
        return prompt
    return replace(prompt, metadata={**prompt.metadata, SOURCE: name})


def with_choices(prompts: Iterable[Prompt], reward: str | None, environment: str | None) -> Iterable[Prompt]:
    """Return the prompts, each of which chooses these unless it chooses others; None changes nothing."""
    given = {REWARD_CHOICE: reward, ENVIRONMENT_CHOICE: environment}
    chosen: dict[str, Json] = {field: name for field, name in given.items() if name is not None}
    if not chosen:
        return prompts
    return (replace(prompt, metadata={**chosen, **prompt.metadata}) for prompt in prompts)
