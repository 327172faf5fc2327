"""Files of a run that an agent's programs on an actor's host must not see."""

from collections.abc import Iterator
from pathlib import Path

from launch.config import RunConfig


def hidden_files(config: RunConfig) -> Iterator[Path]:
    """Yield the run's directory, the files of its prompts, which have labels, and the credentials in use.

    Not all of them need be on this host."""
    yield config.directory / config.run
    if config.bus.creds is not None:
        yield config.bus.creds
    given = [config.data.prompts, config.data.heldout]
    given += [source.prompts for source in config.data.sources]
    given += [one.prompts for one in config.evaluation.sets]
    yield from (_file(path) for path in given if path is not None)


def _file(path: Path) -> Path:
    """Return the file of which a path may name a slice."""
    return Path(str(path).partition("@[")[0])
