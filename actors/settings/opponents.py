"""Settings of frozen opponents. Loads without torch."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from bus.config import Config

TAKEN = ("default", "self", "scripted")
"""Names of other players: the trained policy, itself on another side, and a game's own player."""
_LAG = re.compile(r"latest\s*-\s*(\d{1,9})")


class OpponentConfig(Config):
    """A frozen policy with an engine of its own, which environments ask by its name. It is not trained."""

    version: int | str | None = None
    """Published version that it is: a number, or `latest - K` for one that follows the policy K versions
    behind. A number must be among `learner.publication.keep_versions`, or it is gone after a few versions."""
    refresh_every: int = Field(1, ge=1)
    """Versions from one change of a `latest - K` to the next. An actor holds K / refresh_every + 2 sets of
    weights for it in the host's memory."""
    path: Path | None = None
    """Directory of a Hugging Face model with weights that it is instead, whose tokenizer is the run's. Its
    tokens are recorded as of version 0."""
    engine: Literal["same", "embedded"] = "same"
    """Engine that it is served by: one as `actors.engine` says, or an embedded one."""
    url: str | None = None
    """Running SGLang server that serves it, where `actors.engine` attaches to running servers: those have the
    weights of the policy."""

    @field_validator("version")
    @classmethod
    def _is_a_version(cls, given: int | str | None) -> int | str | None:
        if isinstance(given, str):
            if given.strip().isdecimal():
                return int(given)
            if not _LAG.fullmatch(given.strip()):
                raise ValueError(f'version={given!r} is no version: write a number, or "latest - 10"')
            return given.strip()
        if given is not None and given < 0:
            raise ValueError(f"version={given} is no version: they count from 0")
        return given

    @model_validator(mode="after")
    def _is_one_policy(self) -> Self:
        if (self.version is None) == (self.path is None):
            raise ValueError(
                f"version={self.version!r} and path={self.path}: an opponent is one of them, so give one"
            )
        return self

    @property
    def pinned(self) -> int | None:
        """Return the version of a fixed opponent; None for one that follows the policy, or has a path."""
        return self.version if isinstance(self.version, int) else None

    @property
    def lag(self) -> int | None:
        """Return the versions by which the opponent lags the policy; None for one that stays as it is."""
        found = _LAG.fullmatch(self.version) if isinstance(self.version, str) else None
        return None if found is None else int(found[1])


def refuse_misnamed(opponents: Collection[str], asked: Collection[str], *, setting: str = "opponent") -> None:
    """Raise `ValueError` for an opponent that is asked and not there, or that has another player's name."""
    if missing := sorted(set(asked) - set(opponents)):
        raise ValueError(
            f"environment.{setting}={missing[0]!r} is none of opponents ({', '.join(opponents) or 'none'}): "
            f'define it, as opponents.{missing[0]}.version="latest - 10"'
        )
    if taken := sorted(set(opponents) & set(TAKEN)):
        raise ValueError(f"opponents.{taken[0]}: this name means another player: choose another one")
