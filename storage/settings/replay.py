"""Settings of the trajectory store and its shards."""

import re
from typing import Self

from pydantic import Field, model_validator

from bus.config import Config
from bus.errors import ConfigError
from storage.settings.weights_transport import ServerConfig


def shard_numbers(text: str) -> tuple[int, ...]:
    """Return the ascending shard numbers of text such as `0,2-3`. Raises `ConfigError` for other text."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{text!r} names no shards: write 2, or 0-3, or 0,2-3")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(numbers))


class ReplayConfig(Config):
    """The trajectory store."""

    shards: int = Field(2, ge=1)
    """Number of independent stores, each with one writer; a group is in one of them."""
    here: str = "all"
    """Shards that the storage process keeps itself: all, none, or numbers as 0-1 or 0,2-3. The others are
    kept by `launch shards`, on any host."""
    server: ServerConfig = ServerConfig()
    """HTTP server at which shards take the routed experts of trajectories, which are large and so do not pass
    the bus. It listens where actors record them, and each process of shards has one. What an actor cannot
    send there travels over the bus."""
    linger_s: float = Field(0.02, ge=0)
    """Time that a shard gathers arriving groups before it writes them as one segment."""
    retain_bytes: int | None = Field(None, ge=0)
    """Bytes of segments that all shards keep on this disk; beyond them the oldest settled ones are removed.
    `None` keeps all.

    A group is settled when it was rejected, or trained on by a step that a durable checkpoint includes."""
    retain_age_s: float | None = Field(None, gt=0)
    """Age at which settled segments are removed. `None` keeps all. A learner that is sent back to an earlier
    checkpoint needs what it trained on since: keep segments as long as you may want to go back."""
    archive: str | None = None
    """Where segments are copied before they are removed: a directory, or any fsspec URL such as
    s3://bucket/replay (needs the extra `s3` and credentials in the AWS environment). It is tried at the
    start. `None` removes segments for good."""

    @model_validator(mode="after")
    def _those_here_exist(self) -> Self:
        if (last := max(self.numbers_here, default=0)) >= self.shards:
            raise ValueError(f"here={self.here!r}: there is no shard {last}, shards={self.shards}")
        return self

    @property
    def numbers_here(self) -> tuple[int, ...]:
        """Return the shards that the storage process keeps."""
        if self.here in ("all", "none"):
            return tuple(range(self.shards)) if self.here == "all" else ()
        return shard_numbers(self.here)
